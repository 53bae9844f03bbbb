"""Where does what a process prints go? Into a file, masked; it is closed before the process ends."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

from finetune.progress import draw_on, is_screen
from finetune.secrets import masked_file

LOG_SECONDS = 1.0
"""How long the end of a process waits for its log."""


@dataclass(frozen=True, slots=True)
class Terminal:
    """Where this process printed before its output went to a file."""

    descriptor: int
    log: subprocess.Popen[bytes]
    """What writes that file."""

    def write(self, text: str) -> None:
        with suppress(OSError):  # a terminal that was closed does not end a run
            os.write(self.descriptor, text.encode("utf-8", errors="backslashreplace"))

    def close_log(self) -> None:
        """Print no more, and wait until all that was printed is in the file."""
        sys.stdout.flush()
        sys.stderr.flush()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        with suppress(subprocess.TimeoutExpired):  # a child of this process may go on printing
            self.log.wait(timeout=LOG_SECONDS)


def print_into(file: os.PathLike[str], *, terminal: bool) -> Terminal:
    """Send everything this process prints to a file, and with `terminal` to where it printed before too.

    It passes through a process that masks secrets, whoever prints: Python, a library in C, a child.
    """
    if terminal and is_screen(1):
        draw_on(os.dup(1))
    log = masked_file(file, terminal=terminal)
    assert log.stdin is not None
    before, target = Terminal(os.dup(2), log), log.stdin.fileno()
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    log.stdin.close()
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    return before
