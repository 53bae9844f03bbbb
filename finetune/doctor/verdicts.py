"""Are devices and their links as they should be? What they computed, copied and exchanged, judged."""

from __future__ import annotations

from collections.abc import Sequence

from finetune.doctor.check import FAIL, PASS, WARN, Check
from finetune.doctor.collective import WARM_UPS, Exchange, RankResult, bus_bytes_s
from finetune.doctor.sizes import GB, gib_text
from finetune.hardware.machine import UNKNOWN, Machine

SLOW, BROKEN = 0.5, 0.1
"""Shares of what a link can give below which a run is slow, and below which something is wrong with it."""
UNEVEN = 0.7
"""A card whose copies are slower than this share of the fastest card's sits in a worse slot."""
NETWORK = "the network between the machines (hardware.network_gbit_s)"


def result_checks(results: Sequence[RankResult], machine: Machine | None) -> list[Check]:
    """What the processes of this host found, judged by what the machine can give; None: not known."""
    if machine is not None and machine.gpu == UNKNOWN.gpu:
        machine = None  # its link is a guess
    copies = [] if results[0].to_device_bytes_s is None else [copies_check(results, machine)]
    return [*trial_checks(results), *copies, *exchange_checks(results, machine)]


def trial_checks(results: Sequence[RankResult]) -> list[Check]:
    """One line for each piece of software, over all devices."""
    checks = []
    for number, trial in enumerate(results[0].trials):
        failed = [result for result in results if not result.trials[number].works]
        if failed:
            first = failed[0].trials[number]
            checks.append(Check(first.name, FAIL, f"{_who(failed)}: {first.detail}", first.fix))
        else:
            devices = f"{len(results)} devices, " if len(results) > 1 else ""
            checks.append(Check(trial.name, PASS, f"{devices}{results[0].device_name}: {trial.detail}"))
    return checks


def copies_check(results: Sequence[RankResult], machine: Machine | None) -> Check:
    """Copies between pinned memory and each card: a card in a worse slot, or a bus that is slow for all."""
    speeds = {r.rank: min(r.to_device_bytes_s or 0, r.to_host_bytes_s or 0) for r in results}
    slowest = min(results, key=lambda result: speeds[result.rank])
    fastest = max(speeds.values())
    detail = f"{_range([r.to_device_bytes_s or 0 for r in results])} GB/s to the card, "
    detail += f"{_range([r.to_host_bytes_s or 0 for r in results])} GB/s back (pinned memory)"
    slot = "See `nvidia-smi -q -d PCIE` for the lanes it has; another slot, riser or machine."
    if speeds[slowest.rank] < UNEVEN * fastest:
        return Check("copies", WARN, f"{detail}; {_who([slowest])} is slower than the others", slot)
    # NVLink says nothing about the bus to the host
    if machine is not None and machine.link.startswith("pcie"):
        lanes = f"{machine.link}, 16 lanes"
        status, detail = _judged(speeds[slowest.rank], machine.link_bytes_s, lanes, detail)
        return Check("copies", status, detail, "" if status == PASS else slot)
    return Check("copies", PASS, detail)


def exchange_checks(results: Sequence[RankResult], machine: Machine | None) -> list[Check]:
    """The collectives: right numbers, and the largest size of each against the link."""
    first = results[0]
    if first.num_processes == 1:
        return [Check("exchange", PASS, "one device: nothing to exchange")]
    wrong = [r for r in results if not all(exchange.right for exchange in r.exchanges)]
    if wrong:
        names = [e.name for e in wrong[0].exchanges if not e.right]
        why = f"{_who(wrong)}: {', '.join(dict.fromkeys(names))} came to wrong numbers over {first.library}"
        on_cpu = first.to_device_bytes_s is None
        way = "Run doctor again" if on_cpu else "Try NCCL_P2P_DISABLE=1"
        return [Check("exchange", FAIL, why, f"{way}; if they stay wrong: change the machine.")]
    slowest = [_slowest(results, number) for number in range(len(first.exchanges))]
    largest = max(exchange.size_bytes for exchange in slowest)
    speeds = {e.name: bus_bytes_s(e, first.num_processes) for e in slowest if e.size_bytes == largest}
    reduce = next(e for e in slowest if (e.name, e.size_bytes) == ("all-reduce", largest))
    told = ", ".join(f"{name} {speed / GB:.3g}" for name, speed in speeds.items())
    rate = f"{1 / reduce.seconds:.3g} all-reduces of {gib_text(largest)} bf16 a second"
    counted = f"{WARM_UPS} warm-ups, mean of {reduce.rounds}"
    if reduce.rounds == 1:
        counted = f"one round, of {reduce.seconds:.1f} s; larger ones were not tried"
    detail = f"{first.num_processes} processes, {first.library}: {rate} ({counted}); bus GB/s: {told}"
    checks = [Check("small exchange", PASS, _smaller(slowest, largest, first.num_processes))]
    if machine is None:
        return [Check("exchange", PASS, f"{detail}; what the link can give is not known"), *checks]
    if machine.gpu is None:
        small = f"{gib_text(largest)}, not 1 GiB, and not judged: processes on a CPU share its memory"
        return [Check("exchange", PASS, f"{detail} ({small})"), *checks]
    can, link = expected(machine)
    status, detail = _judged(min(speeds.values()), can, link, detail)
    if status == FAIL and link == NETWORK:
        status = WARN  # what a network can give is told by the config alone, and may be its default
    return [Check("exchange", status, detail, "" if status == PASS else _advice(results, machine)), *checks]


def expected(machine: Machine) -> tuple[float, str]:
    """Bytes a second that the slowest link on the way can give, and its name."""
    within, name = machine.link_bytes_s, machine.link
    if not machine.p2p and machine.num_gpus > 1:
        # a byte goes into host memory and out again; how much that costs differs, half is our own guess
        within, name = within / 2, f"{name} through host memory, taken for half of it,"
    if machine.num_machines > 1 and (machine.network_bytes_s < within or machine.num_gpus == 1):
        return machine.network_bytes_s, NETWORK
    return within, name


def _who(results: Sequence[RankResult]) -> str:
    return ", ".join(f"rank {r.rank} ({r.device} {r.device_name}, {r.host})" for r in results)


def _range(speeds: Sequence[float]) -> str:
    low, high = f"{min(speeds) / GB:.1f}", f"{max(speeds) / GB:.1f}"
    return low if low == high else f"{low} to {high}"


def _judged(speed: float, can: float, link: str, detail: str) -> tuple[str, str]:
    share = speed / can
    against = f"{detail}; the slowest is {share:.0%} of the {can / GB:.3g} GB/s that {link} can give"
    return FAIL if share < BROKEN else WARN if share < SLOW else PASS, against


def _slowest(results: Sequence[RankResult], number: int) -> Exchange:
    return max((result.exchanges[number] for result in results), key=lambda exchange: exchange.seconds)


def _smaller(slowest: Sequence[Exchange], largest: int, processes: int) -> str:
    parts = []
    for e in slowest:
        if e.size_bytes < largest:
            speed = f"{bus_bytes_s(e, processes) / GB:.3g} GB/s"
            parts.append(f"{e.name} of {gib_text(e.size_bytes)} {e.seconds * 1e3:.3g} ms ({speed})")
    return ", ".join(parts) or "none smaller than that was timed"


def _advice(results: Sequence[RankResult], machine: Machine) -> str:
    if machine.num_machines > 1:
        return "Try NCCL_SOCKET_IFNAME=NAME (the fast network); NCCL_DEBUG=INFO tells whether NET/IB is used."
    if machine.p2p and any(result.peers is False for result in results):
        why = "The cards cannot read each other's memory here (virtual machine, ACS or driver)"
        return f"{why}: see `nvidia-smi topo -p2p r`; another machine."
    ways = "See `nvidia-smi topo -m` and NCCL_DEBUG=INFO; another machine."
    return f"{ways} Strategies that move less: single, or ddp with an adapter (finetune plan compares them)."
