"""What is said of measured devices and links."""

from __future__ import annotations

from dataclasses import replace

from finetune.doctor.check import FAIL, PASS, WARN, Check
from finetune.doctor.collective import ROUNDS, Exchange, RankResult
from finetune.doctor.trials import Trial
from finetune.doctor.verdicts import exchange_checks, expected, result_checks
from finetune.hardware.machine import GB, UNKNOWN, Machine, catalogue, machine_of

GIB, MIB = 2**30, 2**20


def machine(card: str, count: int, hosts: int = 1) -> Machine:
    return machine_of(replace(catalogue()[card], num_gpus=count), hosts)


def results(
    count: int, bus_gb_s: float, copies_gb_s: tuple[float, ...] = (), peers: bool | None = True
) -> list[RankResult]:
    """What `count` ranks would leave whose exchanges come to a bus bandwidth."""
    share = (count - 1) / count
    exchanges = tuple(
        Exchange(
            name, size, size * share * (2 if name == "all-reduce" else 1) / (bus_gb_s * GB), ROUNDS, True
        )
        for size in (MIB, GIB)
        for name in ("all-reduce", "all-gather", "reduce-scatter")
    )
    copies = copies_gb_s or (25.0,) * count
    return [
        RankResult(
            rank=rank,
            num_processes=count,
            pid=100 + rank,
            host="box",
            device=f"cuda:{rank}",
            device_name="card",
            library="NCCL 2.27.5",
            peers=peers,
            to_device_bytes_s=copies[rank] * GB,
            to_host_bytes_s=copies[rank] * GB,
            trials=(Trial("bf16", True, "matrix product off by 2.4e-03"),),
            exchanges=exchanges,
        )
        for rank in range(count)
    ]


def test_nvlink_at_its_usual_speed_passes_with_the_line_that_people_know() -> None:
    checks = {check.name: check for check in result_checks(results(8, 362), machine("h100_80gb", 8))}
    assert {check.status for check in checks.values()} == {PASS}
    assert "8 processes, NCCL 2.27.5: 193 all-reduces of 1 GiB bf16 a second" in checks["exchange"].detail
    assert "the slowest is 80% of the 450 GB/s that nvlink can give" in checks["exchange"].detail
    assert "8 devices, card: matrix product off by 2.4e-03" in checks["bf16"].detail
    assert checks["copies"].detail == "25.0 GB/s to the card, 25.0 GB/s back (pinned memory)"


def test_cards_that_cannot_reach_each_other_are_slow_and_told_why() -> None:
    exchange = exchange_checks(results(4, 9.0, peers=False), machine("l40s", 4))[0]
    assert exchange.status == WARN
    assert "29% of the 31.5 GB/s that pcie4 can give" in exchange.detail
    assert "cannot read each other's memory" in exchange.fix


def test_cards_without_peer_to_peer_are_judged_by_the_way_through_host_memory() -> None:
    fine = exchange_checks(results(4, 12.0, peers=False), machine("rtx4090", 4))[0]
    slow = exchange_checks(results(4, 6.0, peers=False), machine("rtx4090", 4))[0]
    assert fine.status == PASS
    assert "76% of the 15.8 GB/s that pcie4 through host memory" in fine.detail
    assert slow.status == WARN
    assert "nvidia-smi topo -m" in slow.fix


def test_a_cpu_with_wrong_numbers_is_given_no_advice_on_cards() -> None:
    here, exchange = results(2, 1.0)[0], Exchange("all-reduce", 2**20, 0.1, ROUNDS, right=False)
    cpu = replace(here, device="cpu", to_device_bytes_s=None, exchanges=(exchange,))
    (check,) = exchange_checks([cpu], None)
    assert (check.status, check.fix) == (FAIL, "Run doctor again; if they stay wrong: change the machine.")


def test_a_tenth_of_the_link_stops_the_run() -> None:
    assert exchange_checks(results(8, 44), machine("h100_80gb", 8))[0].status == FAIL
    assert exchange_checks(results(8, 46), machine("h100_80gb", 8))[0].status == WARN


def test_several_machines_are_judged_by_the_network_between_them() -> None:
    two = machine("h100_80gb", 8, hosts=2)
    name = "the network between the machines (hardware.network_gbit_s)"
    assert expected(two) == (two.network_bytes_s, name)
    for share in (3, 30):  # the config's word alone stops no run
        slow = exchange_checks(results(4, two.network_bytes_s / GB / share), two)[0]
        assert slow.status == WARN
        assert "NCCL_SOCKET_IFNAME" in slow.fix


def test_the_slowest_rank_is_what_counts() -> None:
    ranks = results(2, 400)
    late = tuple(replace(exchange, seconds=exchange.seconds * 4) for exchange in ranks[1].exchanges)
    judged = exchange_checks([ranks[0], replace(ranks[1], exchanges=late)], machine("h100_80gb", 2))[0]
    assert judged.status == WARN
    assert "22% of the 450 GB/s" in judged.detail


def test_an_exchange_that_was_too_slow_for_more_rounds_is_told_so() -> None:
    ranks = results(2, 0.05)
    slow = [
        replace(
            rank, exchanges=tuple(replace(one, rounds=1) for one in rank.exchanges if one.size_bytes == MIB)
        )
        for rank in ranks
    ]
    exchange, small = exchange_checks(slow, machine("h100_80gb", 2))
    assert exchange.status == FAIL
    assert "(one round, of 0.0 s; larger ones were not tried)" in exchange.detail
    assert small.detail == "none smaller than that was timed"


def test_a_card_in_a_worse_slot_is_named() -> None:
    checks = result_checks(results(4, 14, copies_gb_s=(25, 25, 6, 25)), machine("rtx3090", 4))
    copies = next(check for check in checks if check.name == "copies")
    assert copies.status == WARN
    assert "6.0 to 25.0 GB/s to the card" in copies.detail
    assert "rank 2 (cuda:2 card, box) is slower than the others" in copies.detail


def test_a_bus_that_is_slow_for_all_cards_is_told() -> None:
    checks = result_checks(results(2, 14, copies_gb_s=(6, 6)), machine("rtx3090", 2))
    copies = next(check for check in checks if check.name == "copies")
    assert (copies.status, "19% of the 31.5 GB/s" in copies.detail) == (WARN, True)


def test_wrong_numbers_stop_the_run_at_any_speed() -> None:
    ranks = results(2, 400)
    wrong = tuple(replace(exchange, right=exchange.name != "all-gather") for exchange in ranks[1].exchanges)
    judged = exchange_checks([ranks[0], replace(ranks[1], exchanges=wrong)], machine("h100_80gb", 2))
    assert [check.status for check in judged] == [FAIL]
    assert "rank 1 (cuda:1 card, box): all-gather came to wrong numbers" in judged[0].detail


def test_software_that_fails_on_one_device_is_told_with_its_rank() -> None:
    ranks = results(2, 400)
    broken = replace(ranks[1], trials=(Trial("bf16", False, "matrix product off by nan", "Change it."),))
    check = result_checks([ranks[0], broken], machine("h100_80gb", 2))[0]
    told = "rank 1 (cuda:1 card, box): matrix product off by nan"
    assert check == Check("bf16", FAIL, told, "Change it.")


def test_without_a_known_machine_the_speed_is_told_and_not_judged() -> None:
    card_without_entry = replace(machine("rtx3090", 2), gpu=UNKNOWN.gpu)
    for unknown in (None, card_without_entry):
        exchange = result_checks(results(2, 0.1, copies_gb_s=(1, 1)), unknown)[-2]
        assert exchange.status == PASS
        assert "what the link can give is not known" in exchange.detail
