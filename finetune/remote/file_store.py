"""A store behind any address that fsspec knows: S3, Google, a mounted folder."""

from __future__ import annotations

import base64
import filecmp
import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from finetune.remote.address import is_address, protocol_of
from finetune.remote.store import Done, StoreError, probe_file, words

PART_BYTES, PARTS = 2**26, 9_000
"""S3: size of the parts of a large file, and how many there may be (its own limit is 10,000)."""

BLOCK = 2**24

TIMES = {"connect_timeout": 5, "read_timeout": 60, "retries": {"total_max_attempts": 2, "mode": "standard"}}
"""S3: its client's own patience is minutes; those who call have a patience of their own."""

S3 = ("s3", "s3a")
WITHOUT_FOLDERS = (*S3, "gs", "gcs", "abfs", "az", "oss", "oci", "tos")
"""Names with slashes: making a folder there could make a bucket."""


class FileStore:
    """Files below one address of fsspec."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.protocol = protocol_of(address)
        options: dict[str, Any] = {"skip_instance_cache": True}
        if self.protocol in S3:
            chosen = fsspec.config.conf.get(self.protocol, {}).get("config_kwargs", {})
            options["config_kwargs"] = {**TIMES, **chosen}
        url = address if is_address(address) else f"file://{address}"
        self.system, self.root = fsspec.core.url_to_fs(url, **options)
        self.reads_back = False
        """The store's checksums have turned out to be of something else (files encrypted with a key)."""

    def files(self, folder: str) -> dict[str, int]:
        with words():
            self.system.invalidate_cache()
            start = self._path(folder)
            try:
                found = self.system.find(start, detail=True)
            except FileNotFoundError:
                return {}
            return {name.removeprefix(start).lstrip("/"): int(info["size"]) for name, info in found.items()}

    def put(self, files: Mapping[str, Path], done: Done) -> None:
        with words():
            self.system.invalidate_cache()
            for name, file in files.items():
                if self._holds(name, file):
                    continue
                self._send(name, file)
                if not self._holds(name, file):
                    raise StoreError(f"{name} did not arrive as it was sent")
                done(name)

    def read(self, name: str) -> bytes:
        with words():
            content: bytes = self.system.cat_file(self._path(name))
            return content

    def fetch(self, name: str, target: Path) -> None:
        with words(here=target.parent):
            self.system.get_file(self._path(name), str(target))

    def remove(self, name: str) -> None:
        with words():
            self.system.invalidate_cache()
            try:
                self.system.rm(self._path(name), recursive=True)
            except FileNotFoundError:
                return

    def may_write(self) -> None:
        with words(), probe_file() as (name, file):
            local = isinstance(self.system, LocalFileSystem)
            there = FileStore(str(_where_it_is_made(Path(self.root)))) if local else self
            there.put({name: file}, done=lambda name: None)
            there.system.rm_file(there._path(name))

    def _path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}" if name else self.root

    def _send(self, name: str, file: Path) -> None:
        path = self._path(name)
        if self.protocol not in WITHOUT_FOLDERS:
            self.system.makedirs(path.rpartition("/")[0], exist_ok=True)
        how = {"chunksize": _part_bytes(file)} if self.protocol in S3 else {}
        self.system.put_file(str(file), path, **how)

    def _holds(self, name: str, file: Path) -> bool:
        """Whether the store has this very file, as far as it can tell without sending it back."""
        path = self._path(name)
        try:
            info = self.system.info(path)
        except FileNotFoundError:
            return False
        if info["type"] != "file" or info["size"] != file.stat().st_size:
            return False
        if isinstance(self.system, LocalFileSystem):
            return filecmp.cmp(path, file, shallow=False)
        theirs = _their_sum(info)
        if theirs is None:
            return True
        if not self.reads_back and theirs == _our_sum(file, theirs):
            return True
        same = self._read_back_equals(path, file)
        self.reads_back = self.reads_back or same
        return same

    def _read_back_equals(self, path: str, file: Path) -> bool:
        with self.system.open(path, "rb") as theirs, file.open("rb") as ours:
            while block := ours.read(BLOCK):
                if theirs.read(len(block)) != block:
                    return False
        return True


def _where_it_is_made(folder: Path) -> Path:
    """The folder, or the one above: without that a volume is not mounted, and a folder would stand for it."""
    if folder.exists():
        return folder
    if folder.parent.is_dir():
        return folder.parent
    raise StoreError(f"there is no folder {folder.parent}: is the volume mounted?")


def _part_bytes(file: Path) -> int:
    return max(PART_BYTES, -(-file.stat().st_size // PARTS))


def _their_sum(info: dict[str, Any]) -> str | None:
    """The MD5 that a store gives of a file: Google's own field, or S3's ETag (`...-N`: of N parts)."""
    if info.get("md5Hash"):
        return base64.b64decode(info["md5Hash"]).hex()
    tag = str(info.get("ETag") or "").strip('"')
    digest, _, parts = tag.partition("-")
    is_md5 = len(digest) == 32 and all(letter in "0123456789abcdef" for letter in digest)
    return tag if is_md5 and (not parts or parts.isdigit()) else None


def _our_sum(file: Path, like: str) -> str:
    """The same sum of a file here; S3's of a file in parts is the MD5 of the parts' MD5s."""
    _, _, parts = like.partition("-")
    with file.open("rb") as stream:
        if not parts:
            return hashlib.file_digest(stream, partial(hashlib.md5, usedforsecurity=False)).hexdigest()
        of_parts = hashlib.md5(usedforsecurity=False)
        while part := stream.read(_part_bytes(file)):
            of_parts.update(hashlib.md5(part, usedforsecurity=False).digest())
    return f"{of_parts.hexdigest()}-{parts}"
