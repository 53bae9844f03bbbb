"""How much faster is a run with more processes? Makes its first steps with each number, and measures."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from finetune.distributed.launch import Workers, threads_per_process
from finetune.errors import RunFailed
from finetune.hardware.probe import probe_devices
from finetune.model.fetch import fetch_model
from finetune.report.record import read_report
from finetune.scale.grid import Wanted, grid_of
from finetune.scale.point import Point, point_of, records
from finetune.scale.verdict import verdict
from finetune.short_lived import short_lived
from finetune.training.prepare import prepare_rows
from finetune.training.start import open_run

WORKER = "finetune.training.timed"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a short run as it ends any other verb; a run that trains would save first."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Scaling:
    """What was measured."""

    points: list[Point]
    hold: str
    left_out: list[str]
    """Runs that do not fit by their plan."""
    failed: str = ""
    """Why the runs ended before all of them were made."""

    @property
    def verdict(self) -> str:
        devices = probe_devices()
        told = (
            verdict(self.points, devices.cpu_cores, devices.gpus, self.hold)
            if self.points
            else "nothing is measured"
        )
        return "\n".join([told, *self.left_out])

    @property
    def record(self) -> dict[str, Any]:
        """What `--json` prints, and scale.json holds."""
        return {
            "points": records(self.points),
            "verdict": self.verdict,
            "hold": self.hold,
            "left_out": self.left_out,
            "failed": self.failed or None,
        }


def scale(overrides: list[str], hold: str, say: Say) -> Iterator[Scaling]:
    """Make the runs one after the other; all that is measured so far after each of them.

    A run that fails ends it, and what was measured before is kept.

    Raises:
        Refusal: something has to be changed first.
        DoesNotFit: no two runs fit.
    """
    with short_lived("finetune-scale-") as folder:
        grid = grid_of(overrides, hold, folder)
        for line in grid.notes:
            say(line)
        left_out = [f"{_named(one)} is left out: {one.unfit}" for one in grid.wanted if one.unfit]
        points: list[Point] = []
        for number, one in enumerate(grid.wanted, start=1):
            if one.unfit:
                continue
            say(f"run {number} of {len(grid.wanted)}: {_named(one)}, {one.run.facts.batch.line}")
            try:
                points.append(_measured(one))
            except RunFailed as failed:
                yield Scaling(points, hold, left_out, f"{_named(one)}: {failed}")
                return
            last = points[-1]
            say(f"{_named(one)}: {last.tokens_per_second:,.0f} tokens/s, {last.step_seconds:.3g} s a step")
            yield Scaling(list(points), hold, left_out)


def _named(one: Wanted) -> str:
    strategy = one.run.facts.strategy.value
    return f"{one.num_processes} process{'es' * (one.num_processes > 1)} under {strategy}"


def _measured(one: Wanted) -> Point:
    """One run: opened, given its rows, launched and waited for as `train` does it."""
    run = one.run
    launch = run.config.launch
    handlers = {number: signal.getsignal(number) for number in ENDING}
    run_dir = open_run(run)
    fetch_model(run.config.model)
    with Workers(run_dir, run.facts, launch, _unsaid, WORKER) as workers:
        for number, handler in handlers.items():
            signal.signal(number, handler)  # nothing is saved: leaving at once loses nothing that stays
        prepare_rows(run, run_dir, _unsaid)
        ended = workers.wait_or_leave()
    if ended.exit_code != 0:
        who = f"rank {ended.failed_rank}: " if ended.failed_rank is not None else ""
        raise RunFailed(f"{who}{ended.told}")
    threads = threads_per_process(run.facts, launch)
    return point_of(one.requested, run.facts.device, threads, read_report(run_dir))


def _unsaid(line: str) -> None:
    """The lines of the runs are not of interest here."""
