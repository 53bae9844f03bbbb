"""A rehearsal: the whole run with a twin of its model, stage after stage, and nothing left behind."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass

from finetune.doctor.check import FAIL, PASS
from finetune.errors import FinetuneError, UserError
from finetune.rehearse.play import FOLDER, Play, StageFailed
from finetune.rehearse.room import LEAST_BYTES, NoRoom, refuse_small_room
from finetune.rehearse.stages import STAGES
from finetune.short_lived import short_lived

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


Told = Callable[[Stage, str], None]
"""Hears of each stage as it ends, with what its line on a terminal begins with."""


def rehearse(overrides: list[str], told: Told) -> list[Stage]:
    """All stages in order; behind one that fails the rest is skipped.

    Raises:
        UserError: the words themselves are wrong.
        NoRoom: the disk of TMPDIR is too small.
    """
    stages: list[Stage] = []
    with short_lived(FOLDER) as folder:
        refuse_small_room(folder, LEAST_BYTES)
        play = Play(overrides, folder)
        try:
            for act in STAGES:
                stages.append(_played(act, play, over=any(stage.status == FAIL for stage in stages)))
                told(stages[-1], f"{stages[-1].name:<11}")
        finally:
            play.kill()
    return stages


def stage_lines(stage: Stage, label: str, columns: int) -> str:
    """A stage as the terminal shows it: what it saw beside its label, longer words below each other."""
    head = f"{label} {SHOWN[stage.status]} {stage.seconds:6.1f} s  "
    beside = " " * min(len(head), 26)
    lines = [
        filled
        for line in stage.detail.splitlines() or [""]
        for filled in textwrap.wrap(line, columns - len(beside), break_on_hyphens=False) or [""]
    ]
    if len(head) + len(lines[0]) > columns:
        lines.insert(0, "")  # below a long label
    return "\n".join(
        f"{before}{line}".rstrip()
        for before, line in zip([head, *[beside] * len(lines)], lines, strict=False)
    )


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
        if isinstance(failed, NoRoom) or (isinstance(failed, UserError) and play.composed is None):
            raise  # the disk is too small, or the words themselves are wrong: nothing of the run has begun
        detail, status = str(failed), FAIL
    except Exception as error:  # noqa: BLE001  whatever a library raises is how the stage went
        detail, status = f"{type(error).__name__}: {error}", FAIL
    return Stage(name, status, round(time.monotonic() - start, 1), detail)
