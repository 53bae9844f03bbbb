"""How much memory there is, and is free: the host's, or the container's where that has less.

Needs the standard library alone.
"""

from __future__ import annotations

from pathlib import Path

HOST = Path("/proc/meminfo")
CONTAINER = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and use, as version 2 and version 1 of cgroups tell them inside a container."""


def total_bytes() -> int:
    """The host's RAM, or the container's limit where that is less."""
    return min([_host()["MemTotal"], *(limit for limit, _ in _limits())])


def free_bytes() -> int:
    """Bytes that can be taken without another process or the kernel in the way."""
    host = _host()
    free = host.get("MemAvailable", host["MemFree"])
    return min([free, *(max(limit - used, 0) for limit, used in _limits())])


def swap_bytes() -> int:
    return _host().get("SwapTotal", 0)


def _host() -> dict[str, int]:
    lines = (line.split() for line in HOST.read_text(encoding="utf-8").splitlines() if line.endswith("kB"))
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}


def _limits() -> list[tuple[int, int]]:
    """Limit and use of the container; none where there is no container, or no limit (`max`)."""
    found = []
    for limit, used in CONTAINER:
        try:
            found.append((int(Path(limit).read_text()), int(Path(used).read_text())))
        except (OSError, ValueError):
            continue
    return found
