"""What the processes of a timed run measure, and which of its steps are for what. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

WARM_UP = 3
"""Steps that are not timed: kernels are chosen, memory is taken, caches fill."""
PROFILER_START = 1
"""A step that pays for the start of the profiler and is not looked at."""
PROFILED = 2
"""Steps after the timed ones in which collectives are looked for: looking makes them slower."""

Interval = tuple[int, int]
"""Begin and end, in nanoseconds since 1970."""


@dataclass(frozen=True, slots=True)
class RankTiming:
    """What one process measured."""

    step_seconds: list[float]
    """Each timed step, from the end of the one before it: rows, computing, exchange and logging."""
    data_seconds: list[float]
    """Of it, until the rows of the step were there."""
    profiled_seconds: list[float]
    """Each profiled step."""
    communication_seconds: list[float]
    """Of it, while a collective was in flight and this process computed nothing: the exchange itself, and
    waiting for the other processes.
    """
    peak_bytes: int
    """The most memory up to the end of the timed steps: on the card, or in RAM on the CPU."""


def steps_in_all(timed: int) -> int:
    """The optimizer steps of a run in which so many are timed."""
    return WARM_UP + timed + PROFILER_START + PROFILED


def seconds_alone(collectives: list[Interval], work: list[Interval], window: Interval) -> float:
    """How long within the window a collective was in flight while no work was."""
    covered = _union([*_within(collectives, window), *_within(work, window)])
    busy = _union(_within(work, window))
    return (_length(covered) - _length(busy)) / 1e9


def _within(intervals: list[Interval], window: Interval) -> list[Interval]:
    cut = [(max(begin, window[0]), min(end, window[1])) for begin, end in intervals]
    return [(begin, end) for begin, end in cut if begin < end]


def _union(intervals: list[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def _length(intervals: list[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)
