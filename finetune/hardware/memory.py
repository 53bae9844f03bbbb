"""How much memory is free for one more thing: the host's, or the container's where that has less."""

from __future__ import annotations

from pathlib import Path

import psutil

CONTAINER = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and use, as version 2 and version 1 of cgroups tell them inside a container."""


def total_bytes() -> int:
    """The host's RAM, or the container's limit where that is less."""
    total = int(psutil.virtual_memory().total)
    for limit, _ in CONTAINER:
        try:
            total = min(total, int(Path(limit).read_text()))
        except (OSError, ValueError):
            continue
    return total


def free_bytes() -> int:
    """Bytes that can be taken without another process or the kernel in the way."""
    free = int(psutil.virtual_memory().available)
    for limit, used in CONTAINER:
        try:
            left = int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):  # no such container, or no limit ("max")
            continue
        free = min(free, max(left, 0))
    return free
