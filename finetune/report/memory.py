"""How much memory did each process of a run take, and how much was planned for it?"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.report.metrics import most_memory, number
from finetune.report.reading import Reading, at
from finetune.report.times import plans_differ


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes, all of one kind."""

    kind: str
    """`allocated` on cards, `resident` on the CPU."""
    measured: dict[int, float]
    """The most of each rank over all starts of the run."""
    planned: dict[str, float]
    """`expected` and `upper` of one process, by the plan of the last start; empty: it is not known."""
    plans_differ: bool
    """An earlier start had another plan, so that what was measured is no share of this one."""

    @property
    def most(self) -> float | None:
        return max(self.measured.values(), default=None)


def memory_of(reading: Reading) -> Memory:
    """Of the kind that the plan speaks of first: as the run reports it, and as it logged it."""
    kind = _kind(reading)
    return Memory(kind, _measured(reading, kind), _planned(reading, kind), plans_differ(reading.starts))


def _kind(reading: Reading) -> str:
    """What was planned has the same names."""
    ranks = at(reading.report, "memory", "measured_bytes")
    measured = ranks[0] if isinstance(ranks, list) and ranks else None
    planned = at(reading.report, "memory", "planned_bytes") or at(reading.plan, "forecast", "memory")
    kinds = measured or planned or reading.metrics.memory
    return next(iter(kinds), "allocated") if isinstance(kinds, dict) else "allocated"


def _measured(reading: Reading, kind: str) -> dict[int, float]:
    ranks = at(reading.report, "memory", "measured_bytes")
    sizes = [number(at(own, kind)) for own in ranks] if isinstance(ranks, list) else []
    reported = [{} if size is None else {kind: size} for size in sizes]
    most = most_memory(reported, {kind: reading.metrics.memory.get(kind, [])})
    return {rank: own[kind] for rank, own in enumerate(most) if own.get(kind)}


def _planned(reading: Reading, kind: str) -> dict[str, float]:
    for planned in (
        at(reading.report, "memory", "planned_bytes"),
        at(reading.plan, "forecast", "memory"),
    ):
        found = {name: number(at(planned, kind, name)) for name in ("expected", "upper")}
        if None not in found.values():
            return {name: size for name, size in found.items() if size is not None}
    return {}
