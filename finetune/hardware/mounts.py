"""What file systems are mounted where, and what room do they have? Needs the standard library alone."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/mounts")
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Room:
    """The file system that a folder lies on, or would lie on."""

    nearest: Path
    """The folder itself, or the nearest one above that exists."""
    total_bytes: int
    free_bytes: int
    free_files: int | None
    """Files that can still be made; None: the file system sets no such limit."""


def room_of(folder: Path) -> Room:
    """Ask the file system; one that may not be seen is that of the nearest folder above which may."""
    nearest = next(one for one in (folder, *folder.absolute().parents) if os.path.exists(one))
    system = os.statvfs(nearest)
    free, files = system.f_bavail * system.f_frsize, system.f_favail if system.f_files else None
    return Room(nearest, system.f_blocks * system.f_frsize, free, files)


def mount_of(folder: Path) -> tuple[Path, str]:
    """The mount point at or above a resolved folder, and its kind (`ext4`); empty: not known.

    Of several mounts at the deepest point the last one hides those before it.
    """
    found, kind = Path("/"), ""
    for point, named in _mounts():
        if point in (folder, *folder.parents) and len(point.parts) >= len(found.parts):
            found, kind = point, named
    return found, kind


def _mounts() -> list[tuple[Path, str]]:
    """Points and kinds, in the order in which they were mounted; none where it cannot be read."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    words = (line.split() for line in lines)
    return [(Path(re.sub(r"\\([0-7]{3})", _character, word[1])), word[2]) for word in words]


def _character(octal: re.Match[str]) -> str:
    """Blanks in a name are written as `\\040`."""
    return chr(int(octal[1], 8))
