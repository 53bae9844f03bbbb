"""A store in a model repository of the Hugging Face hub, private where it is new."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.hub import endpoint, reachable
from finetune.remote.address import HUB
from finetune.remote.store import Done, StoreError, probe_file, words

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile


class HubStore:
    """Files of `hub://owner/name`; files that are put together become one commit."""

    def __init__(self, address: str) -> None:
        from huggingface_hub import HfApi

        self.address = address
        self.repository = address.removeprefix(HUB)
        self.api = HfApi(endpoint=endpoint())

    def files(self, folder: str) -> dict[str, int]:
        from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError
        from huggingface_hub.hf_api import RepoFile

        with words():
            try:
                tree = list(self.api.list_repo_tree(self.repository, folder or None, recursive=True))
            except (RemoteEntryNotFoundError, RepositoryNotFoundError):
                return {}
        found = [entry for entry in tree if isinstance(entry, RepoFile)]
        return {entry.path.removeprefix(folder).lstrip("/"): entry.size for entry in found}

    def put(self, files: Mapping[str, Path], done: Done) -> None:
        from huggingface_hub import CommitOperationAdd

        with words():
            wanted = self._missing(files)
            if not wanted:
                return
            operations = [CommitOperationAdd(name, str(file)) for name, file in wanted.items()]
            what = f"{len(wanted)} file{'s' * (len(wanted) > 1)} of a run"
            self.api.create_commit(self.repository, operations, commit_message=what)
            lost = self._missing(wanted)
        if lost:
            raise StoreError(f"did not arrive as they were sent: {', '.join(sorted(lost))}")
        for name in wanted:
            done(name)

    def read(self, name: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "content"
            self.fetch(name, target)
            return target.read_bytes()

    def fetch(self, name: str, target: Path) -> None:
        with words(here=target.parent), tempfile.TemporaryDirectory(dir=target.parent) as folder:
            shutil.move(self.api.hf_hub_download(self.repository, name, local_dir=folder), target)

    def remove(self, name: str) -> None:
        inside = self.files(name)
        with words():
            if inside:
                self.api.delete_folder(name, self.repository, commit_message=f"Remove {name}")
            elif self.api.get_paths_info(self.repository, [name]):
                self.api.delete_file(name, self.repository, commit_message=f"Remove {name}")

    def may_write(self) -> None:
        from huggingface_hub import get_token

        if get_token() is None:
            raise StoreError("nobody is logged in to the hub (no token)")
        if not reachable():
            raise StoreError(f"no connection to {endpoint()}")
        with words(), probe_file() as (name, file):
            self.api.create_repo(self.repository, private=True, exist_ok=True)  # an old one stays as it is
            if not self.api.model_info(self.repository).private:
                raise StoreError(f"{self.repository} is public, and everybody would see what is sent")
            self.put({name: file}, done=lambda name: None)
            self.api.delete_file(name, self.repository, commit_message="Remove the probe")

    def _missing(self, files: Mapping[str, Path]) -> dict[str, Path]:
        """Those that the repository has not, or not with this size and checksum."""
        from huggingface_hub.hf_api import RepoFile

        infos = self.api.get_paths_info(self.repository, list(files))
        there = {entry.path: entry for entry in infos if isinstance(entry, RepoFile)}
        return {
            name: file for name, file in files.items() if name not in there or not _same(file, there[name])
        }


def _same(file: Path, there: RepoFile) -> bool:
    """Compare size and checksum: large files carry their SHA-256, others git's SHA-1."""
    size = file.stat().st_size
    if there.size != size:
        return False
    with file.open("rb") as stream:
        if there.lfs is not None:
            return hashlib.file_digest(stream, "sha256").hexdigest() == there.lfs.sha256
        start = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
        return hashlib.file_digest(stream, lambda: start).hexdigest() == there.blob_id
