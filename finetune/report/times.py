"""When did the processes of a run start and end? One line for each in `times.jsonl`, over all its starts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from finetune.paths import RunDir, append_whole


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a run, the first or a resumed one."""

    started: float
    """Seconds since 1970."""
    ended: float | None
    """None: it goes on, or it was killed and nobody could write it down."""
    behind: int = 0
    """The step that it went on behind; 0: it began with the first."""
    planned: Any = None
    """The memory that its plan says, in whatever words; None: nothing was planned."""


def note_start(run_dir: RunDir, behind: int, planned: Any) -> None:
    """Rank 0 does it, as the first thing of its life."""
    _append(run_dir, {"started": time.time(), "behind": behind, "planned": planned})


def note_end(run_dir: RunDir) -> None:
    """Whichever way it ends; of several ends that follow a start the last one counts."""
    _append(run_dir, {"ended": time.time()})


def read_starts(run_dir: RunDir) -> list[Start]:
    """In the order they were made; a line that cannot be read is as if it were not there."""
    starts: list[Start] = []
    with suppress(OSError):
        for line in run_dir.times.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, AttributeError, TypeError):
                entry = json.loads(line)
                if "started" in entry:
                    behind = int(entry.get("behind", 0))
                    starts.append(Start(float(entry["started"]), None, behind, entry.get("planned")))
                elif starts:
                    starts[-1] = replace(starts[-1], ended=float(entry["ended"]))
    return starts


def warm_up_steps(logged: Iterable[float], starts: list[Start]) -> set[float]:
    """Of the steps that were logged, in their order, the first of each start."""
    steps, begun = list(logged), {0, *(start.behind for start in _kept(starts))}
    first = (next((step for step in steps if step > behind), None) for behind in begun)
    return {step for step in first if step is not None}


def plans_differ(starts: list[Start]) -> bool:
    """Whether the steps of a run were made under several plans."""
    kept = _kept(starts)
    return any(start.planned != kept[-1].planned for start in kept)


def _kept(starts: list[Start]) -> list[Start]:
    """Those that the run has steps of: one that went on behind an earlier step has thrown away what came
    later.
    """
    kept: list[Start] = []
    for start in starts:
        kept = [earlier for earlier in kept if earlier.behind < start.behind] + [start]
    return kept


def _append(run_dir: RunDir, entry: dict[str, Any]) -> None:
    line = json.dumps(entry)
    with suppress(OSError):  # a full disk: the run goes on, and its time is then not known
        append_whole(run_dir.times, f"{line}\n".encode())
