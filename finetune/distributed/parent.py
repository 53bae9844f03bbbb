"""Ties a process to its parent, so that nothing outlives a launcher that was killed (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


_parent: int | None = None
"""Whose end this process asked to be told of."""


def end_with_parent() -> None:
    """Ask the kernel to send this process SIGTERM when its parent dies."""
    global _parent
    _parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def has_lost_parent() -> bool:
    """Whether the parent that this process is tied to has died."""
    return _parent is not None and os.getppid() != _parent
