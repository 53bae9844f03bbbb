"""One process at a time writes to a run's folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from finetune.errors import refuse
from finetune.paths import RunDir


@contextmanager
def held(run_dir: RunDir, machine_rank: int = 0) -> Iterator[None]:
    """Hold the folder, or refuse it: the lock goes with the process, however that ends.

    Of several machines that share the folder machine 0 holds it for all.
    """
    if machine_rank > 0:
        yield
        return
    try:
        file = run_dir.lock.open("w")
    except OSError as error:
        why = f"it cannot be written: {error.strerror}"
        raise refuse(str(run_dir.path), why, subject="the run's folder") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise refuse(
                str(run_dir.path),
                "another process is at work in it",
                "Wait for its end, or stop it.",
                subject="the run's folder",
            ) from error
        yield
