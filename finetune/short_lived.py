"""A folder that goes with the process that made it, and with the next one where that process was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = ".held"
"""A file that is locked for as long as the process lives, however that ends."""


@contextmanager
def short_lived(prefix: str) -> Iterator[Path]:
    """Make a folder in TMPDIR, and remove it behind the block; those that killed processes left go first."""
    _remove_left(prefix)
    hidden = Path(tempfile.mkdtemp(prefix=f".{prefix}"))
    with (hidden / LOCK).open("w") as lock:
        with suppress(OSError):  # a file system without locks: nobody takes the folder for a left one there
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # shown once it is locked: in between it would look like one that was left
        folder = hidden.rename(hidden.with_name(hidden.name.removeprefix(".")))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_left(prefix: str) -> None:
    """Remove this user's folders of that name whose lock no process holds; one without a lock is left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # held, another's, or gone meanwhile
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
