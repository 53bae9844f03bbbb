"""How fast an exchange was, in the words of nccl-tests, and whether it came to the right numbers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from finetune.distributed.world import World
from finetune.doctor.collective import (
    ROUNDS,
    WARM_UPS,
    Exchange,
    _collectives,
    bus_bytes_s,
    seconds_of,
    sent_by,
    turns,
)
from finetune.doctor.sizes import GB, GIB, MIB, gb_text, gib_text


@pytest.mark.parametrize(
    ("name", "processes", "gb_s"),
    # 1 GiB in 10 ms: 107.4 GB/s as nccl-tests' algorithm bandwidth
    [
        ("all-reduce", 2, 107.37),
        ("all-reduce", 8, 187.90),
        ("all-gather", 8, 93.95),
        ("reduce-scatter", 4, 80.53),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(name: str, processes: int, gb_s: float) -> None:
    assert bus_bytes_s(Exchange(name, GIB, 0.010, ROUNDS, True), processes) / GB == pytest.approx(
        gb_s, abs=0.01
    )


def test_sizes_are_told_in_round_numbers() -> None:
    told = {MIB: "1 MiB", 64 * MIB: "64 MiB", GIB: "1 GiB", GIB - 4: "1 GiB", 40448 * MIB: "39.5 GiB"}
    assert {size: gib_text(size) for size in told} == told
    assert (gb_text(16.38 * GB), gb_text(250e6)) == ("16.4 GB", "250.0 MB")


@pytest.mark.parametrize("processes", [2, 56, 57, 64, 1000])
def test_a_sum_is_exact_with_any_number_of_processes_and_one_left_out_is_seen(
    processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def summed(ranks: list[int]) -> bool:
        """What rank 1 finds when the numbers of these others are added to its own, one by one in bfloat16."""
        order = iter(turns(processes))

        def add(whole: torch.Tensor) -> None:
            turn = next(order)
            for rank in ranks:
                whole += sent_by(rank, turn)

        monkeypatch.setattr(dist, "all_reduce", add)
        whole, part = (torch.empty(size, dtype=torch.bfloat16) for size in (4 * processes, 4))
        (_, _, is_right), *_ = _collectives(World(1, 1, processes), whole, part)
        return is_right()

    others = [rank for rank in range(processes) if rank != 1]
    assert summed(others) is True
    assert [last for last in {others[0], others[-1]} if summed([one for one in others if one != last])] == []


def test_a_slow_round_is_the_measurement_and_all_ranks_decide_alike() -> None:
    rounds: list[int] = []
    assert seconds_of(lambda: rounds.append(1), "cpu", lambda own: own + 5)[1] == 1  # another rank was slow
    assert len(rounds) == 1
    rounds.clear()
    assert seconds_of(lambda: rounds.append(1), "cpu")[1] == ROUNDS
    assert len(rounds) == WARM_UPS + ROUNDS
