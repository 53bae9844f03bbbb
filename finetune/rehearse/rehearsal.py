"""A rehearsal: the whole run with a twin of its model, stage after stage, and nothing left behind."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from finetune.doctor.check import FAIL, PASS
from finetune.errors import FinetuneError, UserError
from finetune.rehearse.play import Play, StageFailed
from finetune.rehearse.stages import STAGES

SKIP = "skip"
UNTOLD = """\
A rehearsal cannot tell: NCCL and CUDA kernels (see doctor), memory of cards and
speed (see plan), and what the model learns."""
SHOWN = {PASS: "pass", FAIL: "FAIL", SKIP: "skip"}


@dataclass(frozen=True, slots=True)
class Stage:
    """How one part of the rehearsal went."""

    name: str
    status: str
    """`pass`, `fail`, or `skip`: an earlier one failed."""
    seconds: float
    detail: str


def rehearse(overrides: list[str], told: Callable[[Stage], None]) -> list[Stage]:
    """All stages in order; behind one that fails the rest is skipped. `told` hears of each as it ends.

    Raises:
        UserError: the words themselves are wrong.
    """
    stages: list[Stage] = []
    with TemporaryDirectory(prefix="finetune-rehearsal-") as folder:
        play = Play(overrides, Path(folder))
        try:
            for act in STAGES:
                stages.append(_played(act, play, over=any(stage.status == FAIL for stage in stages)))
                told(stages[-1])
        finally:
            play.kill()
    return stages


def stage_lines(stage: Stage, columns: int) -> str:
    """A stage as the terminal shows it: what it saw beside its name, longer words below each other."""
    head = f"{stage.name:<11} {SHOWN[stage.status]} {stage.seconds:6.1f} s  "
    beside = " " * min(len(head), 26)
    lines = [
        filled
        for line in stage.detail.splitlines() or [""]
        for filled in textwrap.wrap(line, columns - len(beside), break_on_hyphens=False) or [""]
    ]
    return head + f"\n{beside}".join(lines)


def verdict(stages: list[Stage]) -> str:
    """How it went, in one line."""
    counts = {status: sum(stage.status == status for stage in stages) for status in SHOWN}
    seconds = sum(stage.seconds for stage in stages)
    told = f"{counts[PASS]} passed, {counts[FAIL]} failed, {counts[SKIP]} skipped in {seconds:,.0f} s"
    if counts[FAIL]:
        failed = next(stage.name for stage in stages if stage.status == FAIL)
        return f"{told}: the run would fail ({failed})"
    return f"{told}: nothing in the way of the run was found"


def _played(act: Callable[[Play], str], play: Play, over: bool) -> Stage:
    name = act.__name__
    if over:
        return Stage(name, SKIP, 0.0, "")
    start = time.monotonic()
    try:
        detail, status = act(play), PASS
    except (StageFailed, FinetuneError) as failed:
        if isinstance(failed, UserError) and play.composed is None:
            raise  # the words themselves are wrong
        detail, status = str(failed), FAIL
    except Exception as error:  # noqa: BLE001  whatever a library raises is how the stage went
        detail, status = f"{type(error).__name__}: {error}", FAIL
    return Stage(name, status, round(time.monotonic() - start, 1), detail)
