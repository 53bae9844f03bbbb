"""What does the machine have besides its cards: memory, cores, disks, limits, tools?

What a container allows counts, not what its host has. Needs the standard library alone.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from finetune.hardware.cores import usable_cores
from finetune.hardware.memory import free_bytes, swap_bytes, total_bytes
from finetune.hardware.mounts import SHARED_MEMORY, mount_of, room_of
from finetune.paths import PACKAGE

PROBE_BYTES, CHUNK_BYTES, PROBE_SECONDS = 256 * 2**20, 8 * 2**20, 1.5
"""How much is written to measure a disk, in pieces that each reach it, and for how long at most."""
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "fuse.", "ceph", "lustre", "gpfs", "beegfs", "9p", "virtiofs")
"""How file systems begin whose files lie on another machine."""
SUITABLE = ((3, 11), (3, 13))
"""The oldest and the newest Python that the package is installed with."""
PYTHONS = ("python3", "python3.13", "python3.12", "python3.11")


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system that a folder lies on, or would lie on."""

    folder: str
    nearest: str
    """The folder itself, or the nearest one above that exists."""
    mount: str
    """Where its file system is mounted."""
    kind: str
    """`ext4`, `overlay`, `tmpfs`, `nfs4`, ...; empty: not known."""
    free_bytes: int
    free_files: int | None
    """Files that can still be made; None: the file system sets no such limit."""
    write_bytes_s: float | None
    """Measured; None: it was not, or too little is free for it."""
    problem: str
    """Why nothing can be written; empty: it can."""

    @property
    def in_memory(self) -> bool:
        return self.kind in ("tmpfs", "ramfs")

    @property
    def in_container(self) -> bool:
        """It goes with the container."""
        return self.kind in ("overlay", "overlayfs", "aufs")

    @property
    def on_network(self) -> bool:
        return self.kind.startswith(NETWORK)


@dataclass(frozen=True, slots=True)
class Host:
    """The machine without its cards."""

    memory_bytes: int
    free_memory_bytes: int
    swap_bytes: int
    cores: float
    """That this process may use at once; a container's share may be a fraction."""
    shared_memory_bytes: int
    """Of /dev/shm; 0: there is none."""
    open_files: int
    open_files_possible: int
    """What `ulimit -n` may raise it to; -1: no limit."""
    disk: Disk
    now: float
    """The machine's clock, in seconds since 1970."""
    files_are_from: float
    """When the newest file of this package was written."""
    python: tuple[int, int]
    other_python: str
    """A suitable interpreter on PATH; looked for where this one is not suitable itself."""
    missing_tools: tuple[str, ...]
    """Of make and g++."""
    glibc: tuple[int, int] | None
    """None: another C library, or not known."""


def read_host(folder: Path, *, measure_disk: bool) -> Host:
    """Look at the machine; `folder` is where runs would be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Host(
        memory_bytes=total_bytes(),
        free_memory_bytes=free_bytes(),
        swap_bytes=swap_bytes(),
        cores=usable_cores(),
        shared_memory_bytes=room_of(SHARED_MEMORY).total_bytes if SHARED_MEMORY.is_dir() else 0,
        open_files=soft,
        open_files_possible=hard,
        disk=_disk(folder, measure_disk),
        now=time.time(),
        files_are_from=max(file.stat().st_mtime for file in PACKAGE.glob("*.py")),
        python=(sys.version_info.major, sys.version_info.minor),
        other_python="" if _suits(sys.version_info[:2]) else next(filter(_runs_suitable, PYTHONS), ""),
        missing_tools=tuple(name for name in ("make", "g++") if not shutil.which(name)),
        glibc=_glibc(),
    )


def _disk(folder: Path, measured: bool) -> Disk:
    folder = folder.expanduser().absolute()
    room = room_of(folder)
    mount, kind = mount_of(room.nearest.resolve())
    speed, problem = _write_speed(room.nearest, room.free_bytes) if measured else (None, "")
    return Disk(
        folder=str(folder),
        nearest=str(room.nearest),
        mount=str(mount),
        kind=kind,
        free_bytes=room.free_bytes,
        free_files=room.free_files,
        write_bytes_s=speed,
        problem=problem,
    )


def _write_speed(folder: Path, free: int) -> tuple[float | None, str]:
    """Bytes a second that reach the disk, and why nothing can be written.

    The file has no name, so that nothing of it is left whatever happens.
    """
    allowed = min(PROBE_BYTES, free // 10)
    piece = os.urandom(min(CHUNK_BYTES, max(allowed, 1)))
    written, start = 0, time.monotonic()
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            while written + len(piece) <= allowed and time.monotonic() - start < PROBE_SECONDS:
                written += file.write(piece)
                os.fsync(file.fileno())
    except OSError as error:
        return None, error.strerror or str(error)
    enough = written >= 2**20  # less is over before a clock can tell
    return written / (time.monotonic() - start) if enough else None, ""


def _suits(version: tuple[int, int]) -> bool:
    return SUITABLE[0] <= version <= SUITABLE[1]


def _runs_suitable(name: str) -> bool:
    """Ask it: what stands on PATH may be a stand-in for a version that is not installed."""
    question = "import sys; print(*sys.version_info[:2])"
    try:
        words = [name, "-c", question]
        answer = subprocess.run(words, capture_output=True, text=True, timeout=5, check=False).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return False
    return len(answer) == 2 and _suits((int(answer[0]), int(answer[1])))


def _glibc() -> tuple[int, int] | None:
    name, version = platform.libc_ver()
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if name == "glibc" and found else None


def _read(file: Path) -> str:
    """Empty where it is not there or may not be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
