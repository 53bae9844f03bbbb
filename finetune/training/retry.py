"""Failures that pass: how long until the next try, what is told of them, and when they are too many."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0

PATIENCE_SECONDS = 300.0
"""At the end of a run: how long nothing but failures is borne, while a machine that may be rented by the hour
does nothing else. Most outages of a store are over by then. FINETUNE_REMOTE_PATIENCE has another number."""

SILENCE = 6
"""How many times as long a call is borne that neither fails nor gets on: half an hour. A slow store may need
minutes, to put a large file's parts together; a mount that hangs and a client without a timeout never end."""

GETS_ON_BYTES = 2**20
"""A client that sends a file reads it: so much more read since the last look is no silence."""


class Waiting:
    """Twice as long each time, up to a minute, and never two machines in step; an event ends the wait."""

    def __init__(self, event: Event) -> None:
        self.event = event
        self.seconds = FIRST_WAIT_SECONDS

    def longer(self) -> None:
        self.event.wait(self.seconds * random.uniform(0.5, 1.0))
        self.seconds = min(2 * self.seconds, LONGEST_WAIT_SECONDS)

    def reset(self) -> None:
        self.seconds = FIRST_WAIT_SECONDS


class Trouble:
    """A streak of failures: told once when it begins, and once when it is over."""

    def __init__(self, where: str, say: Callable[[str], None]) -> None:
        self.where = where
        self.say = say
        self.began: float | None = None
        self.failures = 0
        self.progressed = 0.0
        """When something arrived last."""
        self.answered = 0.0
        """When something arrived or failed last, or was read to be sent."""
        self.read = 0

    def met(self, error: Exception) -> None:
        self.failures += 1
        self.heard()
        if self.began is None:
            self.began = time.monotonic()
            self.say(f"WARNING   not sent to {self.where}: {error}; the run goes on, and it is tried again")

    def progress(self) -> None:
        self.progressed = time.monotonic()
        self.heard()

    def heard(self) -> None:
        self.answered, self.read = time.monotonic(), _bytes_read()

    def over(self) -> None:
        if self.began is None:
            return
        seconds = time.monotonic() - self.began
        tries = f"{self.failures} failure{'s' * (self.failures > 1)}"
        self.say(f"remote    {self.where} takes files again, after {tries} in {seconds:.0f} s")
        self.began, self.failures = None, 0

    def too_long(self, since: float) -> bool:
        """Whether there was nothing but failures, from a moment on, for longer than is borne."""
        return time.monotonic() - max(since, self.progressed) > _patience()

    def silence(self) -> float:
        """For how many seconds nothing has been heard of the store."""
        if _bytes_read() - self.read >= GETS_ON_BYTES:
            self.heard()
        return time.monotonic() - self.answered

    def silent(self) -> bool:
        """Whether that is longer than is borne."""
        return self.silence() > SILENCE * _patience()


def _patience() -> float:
    return float(os.environ.get("FINETUNE_REMOTE_PATIENCE", PATIENCE_SECONDS))


def _bytes_read() -> int:
    """What this process has read so far, of files and whatever else."""
    counted = dict(line.split(": ") for line in Path("/proc/self/io").read_text("ascii").splitlines())
    return int(counted["rchar"])
