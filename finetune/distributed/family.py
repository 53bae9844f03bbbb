"""A process with all that it has started, and the end of them."""

from __future__ import annotations

import psutil


def family(pid: int) -> list[psutil.Process]:
    """The process and its descendants; empty when it is gone."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_family(pid: int, seconds: float = 5.0) -> None:
    """End all of them at once, none of which hears of it, and wait until they are gone."""
    alive = family(pid)
    for process in alive:
        with Gone():
            process.kill()
    psutil.wait_procs(alive, timeout=seconds)


class Gone:
    """A process that ended meanwhile is no error."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        return kind is not None and issubclass(kind, psutil.Error)
