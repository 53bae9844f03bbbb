"""When did the processes of a run start and end? One line for each in `times.jsonl`, over all its starts."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass

from finetune.paths import RunDir, append_whole


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a run, the first or a resumed one."""

    started: float
    """Seconds since 1970."""
    ended: float | None
    """None: it goes on, or it was killed and nobody could write it down."""


def note_start(run_dir: RunDir) -> None:
    """Rank 0 does it, as the first thing of its life."""
    _append(run_dir, "started")


def note_end(run_dir: RunDir) -> None:
    """Whichever way it ends; of several ends that follow a start the last one counts."""
    _append(run_dir, "ended")


def read_starts(run_dir: RunDir) -> list[Start]:
    """In the order they were made; a line that cannot be read is as if it were not there."""
    starts: list[Start] = []
    with suppress(OSError):
        for line in run_dir.times.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, AttributeError, TypeError):
                entry = json.loads(line)
                if "started" in entry:
                    starts.append(Start(float(entry["started"]), None))
                elif starts:
                    starts[-1] = Start(starts[-1].started, float(entry["ended"]))
    return starts


def _append(run_dir: RunDir, what: str) -> None:
    line = json.dumps({what: time.time()})
    with suppress(OSError):  # a full disk: the run goes on, and its time is then not known
        append_whole(run_dir.times, f"{line}\n".encode())
