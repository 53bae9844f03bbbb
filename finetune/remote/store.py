"""A place off this machine that keeps files: what it can do, how it is opened, what its failures mean."""

from __future__ import annotations

import errno
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Protocol

from finetune.remote.address import HUB, protocol_of, whole_address

PROBE_SECONDS = 10.0
"""How long a store may take to say that it can be written: clients retry for minutes before they say no."""

CREDENTIALS = (
    "Credentials come from the environment or a login (S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
    "AWS_PROFILE; Google: GOOGLE_APPLICATION_CREDENTIALS; hub: HF_TOKEN): check them and what they may write."
)
MISSING = "Make it first (a bucket is never made here), or correct the address."
PUBLIC = "Make it private in its settings, or name another one: a new one is made private."
UNMOUNTED = "Mount the volume, or make the folder above it first, or correct the path."
NETWORK = "Check the network of this machine, and the address (AWS_ENDPOINT_URL for an S3 of your own)."

SIGNS = {
    PUBLIC: ("is public",),
    UNMOUNTED: ("is the volume mounted",),
    CREDENTIALS: (
        *("credential", "accessdenied", "access denied", "invalidaccesskeyid", "access key", "signature"),
        *("permission", "forbidden", "unauthorized", "token"),
    ),
    MISSING: ("nosuchbucket", "no such bucket", "bucket does not exist", "notfound", "not found"),
    NETWORK: ("connect", "timeout", "timed out", "resolve", "unreachable", "offline", "did not answer"),
}
"""Words in a failure -> what to do about it."""

CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""What a disk says that nobody meets who only reads."""

Done = Callable[[str], None]


class StoreError(Exception):
    """What a store could not do, in words, and what to do about it."""

    def __init__(self, why: str, kind: str = "") -> None:
        super().__init__(why)
        said = f"{kind} {why}".lower()
        self.fix = next((fix for fix, signs in SIGNS.items() if any(sign in said for sign in signs)), "")


class Store(Protocol):
    """Files under names like `run/checkpoints/checkpoint-8/state.json`; each method raises `StoreError`."""

    address: str

    def files(self, folder: str) -> dict[str, int]:
        """Every file below a folder, named from there, with its size; nothing where there is no folder."""
        ...

    def put(self, files: Mapping[str, Path], done: Done) -> None:
        """Bring files there under their names and see that each arrived whole; equal ones are left alone.
        `done` is told each that was sent.
        """
        ...

    def read(self, name: str) -> bytes:
        """A small file's content."""
        ...

    def fetch(self, name: str, target: Path) -> None:
        """Bring one file here; what this machine's own disk refuses is raised as the `OSError` that it is."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it."""
        ...

    def may_write(self) -> None:
        """Find out whether files may be put here, and leave nothing behind: no folder either. (A repository
        of the hub is made, private and empty: nothing else shows what a login may make.)
        """
        ...


def open_store(address: str) -> Store:
    """The store at an address; nothing is asked of it yet."""
    if address.startswith(HUB):
        from finetune.remote.hub_store import HubStore

        return HubStore(whole_address(address))
    from finetune.remote.file_store import FileStore

    with words():
        return FileStore(whole_address(address))


def try_out(address: str) -> None:
    """Write and remove a tiny file within `PROBE_SECONDS`; raises `StoreError`."""
    found: list[StoreError] = []

    def knock() -> None:
        try:
            open_store(address).may_write()
        except StoreError as error:
            found.append(error)

    knocking = Thread(target=knock, daemon=True)  # a client that hangs does not keep the process
    knocking.start()
    knocking.join(PROBE_SECONDS)
    if knocking.is_alive():
        raise StoreError(f"{protocol_of(address)}:// did not answer within {PROBE_SECONDS:.0f} s")
    if found:
        raise found[0]


@contextmanager
def words(here: Path | None = None) -> Iterator[None]:
    """Turn whatever a client raises into one line, but for what the disk below a folder `here` refuses."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        if here is not None and isinstance(error, OSError) and _is_of(error, here):
            raise
        kind = type(error).__name__
        raise StoreError(" ".join(str(error).split()) or kind, kind) from error


def _is_of(error: OSError, folder: Path) -> bool:
    named = isinstance(error.filename, str) and Path(error.filename).is_relative_to(folder)
    return named or error.errno in CANNOT_WRITE


@contextmanager
def probe_file() -> Iterator[tuple[str, Path]]:
    """A tiny file, and a name that nobody else uses."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "probe"
        file.write_bytes(b"finetune can write here\n")
        yield f".finetune-probe-{secrets.token_hex(6)}", file
