"""What the control groups of this process allow it, and how often the kernel has killed in them.

Versions 1 and 2. A process's own group counts and all above it, whether a container sees its path or not.
Needs the standard library alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

OWN = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """How much memory a group may take, and takes."""

    limit_bytes: int
    used_bytes: int
    """Without the cache of files, which the kernel drops when memory is asked for."""


def memory_limits() -> list[MemoryLimit]:
    """Of every group that has one."""
    files = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    found = []
    for folder in _folders("memory"):
        for limit_file, used_file in files:
            limit, used = _number(folder / limit_file), _number(folder / used_file)
            if limit is not None and used is not None:
                found.append(MemoryLimit(limit, max(used - _file_cache(folder), 0)))
    return found


def cpu_limit() -> float | None:
    """CPU seconds that may be used in a second; None: as many as there are cores."""
    shares = []
    for folder in _folders("cpu"):
        words = _text(folder / "cpu.max").split()
        words = words or [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(words) == 2 and all(word.isdigit() for word in words):  # "max" and -1: no limit
            shares.append(int(words[0]) / int(words[1]))
    return min(shares, default=None)


def oom_kills() -> int | None:
    """How many processes of this group the kernel has killed for lack of memory; None: it does not tell."""
    files = (
        folder / name for folder in _folders("memory") for name in ("memory.events", "memory.oom_control")
    )
    return next((count for file in files if (count := _oom_kills(file)) is not None), None)


def machine_oom_kills() -> int | None:
    """The same of the whole machine, other containers included."""
    return _oom_kills(Path("/proc/vmstat"))


def _folders(controller: str) -> list[Path]:
    """Of the groups of this process that a controller limits, its own first."""
    found: list[Path] = []
    for line in _text(OWN).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = ROOT / controller if controllers else ROOT
        own = root / path.lstrip("/")
        found += [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
    within = [ROOT / controller, ROOT]  # a container may see its group as the root, whatever its path says
    return [folder for folder in dict.fromkeys([*found, *within]) if folder.is_dir()]


def _file_cache(folder: Path) -> int:
    told = re.search(r"^(?:total_)?inactive_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
    return int(told[1]) if told else 0


def _oom_kills(file: Path) -> int | None:
    told = re.search(r"^oom_kill (\d+)$", _text(file), re.MULTILINE)
    return int(told[1]) if told else None


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    """Empty where it is not there or may not be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
