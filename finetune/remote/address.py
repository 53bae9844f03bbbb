"""Addresses off this machine: of a store, of a run in it, of one checkpoint of that run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

HUB = "hub://"
CHECKPOINT = re.compile(r"checkpoint-\d+")


@dataclass(frozen=True, slots=True)
class Place:
    """A run in a store, or one checkpoint of it."""

    store: str
    run_name: str
    checkpoint: str | None = None
    """The name of its folder; None: the newest."""

    @property
    def run(self) -> str:
        """The run's own address."""
        return f"{self.store}/{self.run_name}"


def is_address(text: str) -> bool:
    """Tell an address from a path and from a word."""
    return "://" in text


def protocol_of(address: str) -> str:
    """What stands before `://`; a plain path is a file's."""
    return address.partition("://")[0] if is_address(address) else "file"


def whole_address(text: str) -> str:
    """An address as it is printed and put together with names: no slash at its end, no relative path."""
    if is_address(text):
        return text.rstrip("/")
    return str(Path(text).expanduser().absolute())


def folder_of(address: str) -> Path | None:
    """The folder of this machine that an address means; None: it means another place."""
    if protocol_of(address) not in ("file", "local"):
        return None
    return Path(address.partition("://")[2] if is_address(address) else address).expanduser().absolute()


def place_in(address: str) -> Place | None:
    """Read `STORE/RUN` or `STORE/RUN/checkpoints/checkpoint-N`; None: it names no run in a store."""
    start, _, rest = whole_address(address).partition("://")
    parts = rest.split("/")
    checkpoint = None
    if len(parts) > 2 and parts[-2] == "checkpoints" and CHECKPOINT.fullmatch(parts[-1]):
        parts, checkpoint = parts[:-2], parts[-1]
    needed = 3 if address.startswith(HUB) else 2
    if len(parts) < needed or not all(parts[1:]):
        return None
    return Place(f"{start}://{'/'.join(parts[:-1])}", parts[-1], checkpoint)


def place_of_resume(resume: str, remote: str | None) -> Place | None:
    """The place that `checkpoint.resume` names, in an address or in a path below `checkpoint.remote`."""
    if is_address(resume):
        return place_in(resume)
    store = folder_of(remote) if remote is not None and resume not in ("never", "auto") else None
    path = Path(resume).expanduser().absolute()
    if store is None or store not in path.parents:
        return None
    return place_in(f"file://{path}")
