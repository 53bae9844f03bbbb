"""How much memory there is, and is free: the host's, or the container's where that has less.

Needs the standard library alone.
"""

from __future__ import annotations

from pathlib import Path

from finetune.hardware.cgroup import memory_limits

HOST = Path("/proc/meminfo")


def total_bytes() -> int:
    """The host's RAM, or the container's limit where that is less."""
    return min([_host()["MemTotal"], *(group.limit_bytes for group in memory_limits())])


def free_bytes() -> int:
    """Bytes that can be taken without another process or the kernel in the way."""
    host = _host()
    free = host.get("MemAvailable", host["MemFree"])
    return min([free, *(max(group.limit_bytes - group.used_bytes, 0) for group in memory_limits())])


def swap_bytes() -> int:
    return _host().get("SwapTotal", 0)


def _host() -> dict[str, int]:
    lines = (line.split() for line in HOST.read_text(encoding="utf-8").splitlines() if line.endswith("kB"))
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
