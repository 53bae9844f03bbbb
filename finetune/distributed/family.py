"""A process with all that it has started, and the end of them."""

from __future__ import annotations

import subprocess
from typing import Any

import psutil


def family(pid: int) -> list[psutil.Process]:
    """The process and its descendants; empty when it is gone."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_family(parent: subprocess.Popen[Any], seconds: float = 5.0) -> None:
    """End a process of ours and all of its own at once, none of which hears of it, and wait for them."""
    alive = family(parent.pid)
    for process in alive:
        with Gone():
            process.kill()
    parent.wait()  # first: psutil would take its exit code away from it
    psutil.wait_procs(alive, timeout=seconds)


class Gone:
    """A process that ended meanwhile is no error."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        return kind is not None and issubclass(kind, psutil.Error)
