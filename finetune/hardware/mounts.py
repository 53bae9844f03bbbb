"""What file systems are mounted where? Needs the standard library alone."""

from __future__ import annotations

import re
from pathlib import Path

MOUNTS = Path("/proc/mounts")


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
