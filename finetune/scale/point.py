"""What a timed run came to: its figures, and how they stand beside the run with the fewest processes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

from finetune.config.schema import Strategy
from finetune.training.timing import RankTiming

USUAL = {2: (1.7, 1.9), 4: (3.0, 3.7)}
"""Speed-ups over one card that are seen where nothing is wrong."""


@dataclass(frozen=True, slots=True)
class Point:
    """One number of processes under one strategy, measured."""

    num_processes: int
    strategy: str
    """What ran, as the run itself found it."""
    requested: str
    device: str
    threads_per_process: int
    """Of the CPU."""
    batch: dict[str, int]
    """`per_device`, `accumulation`, `processes`, `global`."""
    steps: int
    """Timed ones."""
    step_seconds: float
    """Median of the timed steps, each as long as its slowest process took."""
    step_seconds_spread: tuple[float, float]
    """The quartiles of the same: half of the steps lie between them."""
    tokens_per_second: float
    """Median of the timed steps, over all processes."""
    communication_share: float
    """Part of a profiled step in which a collective was in flight and nothing was computed beside it, mean
    over the processes.
    """
    waiting_share: float
    """Of that the part beyond the process that waited least: the others waited for it."""
    data_share: float
    """Part of a timed step until its rows were there, of the process that waited longest."""
    slowest_rank: int
    """The process that waited least for the others."""
    peak_bytes: int
    """The most memory of one process."""

    @property
    def exchange_share(self) -> float:
        """Communication without waiting for a slower process."""
        return self.communication_share - self.waiting_share


def point_of(requested: str, device: str, threads: int, report: dict[str, Any]) -> Point:
    """The figures of a run from the report that its workers wrote."""
    ranks = [RankTiming(**rank) for rank in report["timing"]["ranks"]]
    steps = [max(of_step) for of_step in zip(*(rank.step_seconds for rank in ranks), strict=True)]
    waits = [max(of_step) for of_step in zip(*(rank.data_seconds for rank in ranks), strict=True)]
    speeds = [tokens / seconds for tokens, seconds in zip(report["timing"]["tokens"], steps, strict=True)]
    lower, _, upper = quantiles(steps, n=4, method="inclusive")
    in_all = sum(sum(rank.profiled_seconds) for rank in ranks)
    communication = [sum(rank.communication_seconds) for rank in ranks]
    least = sum(min(of) for of in zip(*(rank.communication_seconds for rank in ranks), strict=True))
    return Point(
        num_processes=report["num_processes"]["actual"],
        strategy=report["strategy"]["actual"],
        requested=requested,
        device=device,
        threads_per_process=threads,
        batch=report["batch"],
        steps=len(steps),
        step_seconds=median(steps),
        step_seconds_spread=(lower, upper),
        tokens_per_second=median(speeds),
        communication_share=sum(communication) / in_all,
        waiting_share=(sum(communication) - least * len(ranks)) / in_all,
        data_share=sum(waits) / sum(steps),
        slowest_rank=communication.index(min(communication)),
        peak_bytes=max(rank.peak_bytes for rank in ranks),
    )


def base_of(point: Point, points: list[Point]) -> Point:
    """What a point is compared with: the fewest processes of its strategy, or the single run."""
    own = min((p for p in points if p.requested == point.requested), key=lambda p: p.num_processes)
    single = (p for p in points if p.strategy == Strategy.single)
    return own if own.num_processes == 1 else next(single, own)


def speedup(point: Point, base: Point) -> float:
    """How many times as many tokens in the same time."""
    return point.tokens_per_second / base.tokens_per_second


def efficiency(point: Point, base: Point) -> float:
    """The part of it that so many processes could give."""
    return speedup(point, base) * base.num_processes / point.num_processes


def usual(point: Point, base: Point) -> tuple[float, float] | None:
    """Between which speed-ups cards usually lie; None: nothing is known of such a number, or of a CPU."""
    known = point.device == "cuda" and base.num_processes == 1
    return USUAL.get(point.num_processes) if known else None


def records(points: list[Point]) -> list[dict[str, Any]]:
    """The points as `--json` and scale.json hold them."""
    compared = [(point, base_of(point, points)) for point in points]
    return [
        {
            **asdict(point),
            "speedup": speedup(point, base),
            "efficiency": efficiency(point, base),
            "usual_speedup": usual(point, base),
        }
        for point, base in compared
    ]
