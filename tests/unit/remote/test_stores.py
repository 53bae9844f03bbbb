"""A store sees that each file arrived as it was sent, by what it can tell of it."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from finetune.remote import file_store, hub_store
from finetune.remote.file_store import FileStore
from finetune.remote.store import StoreError, open_store, try_out
from tests.hub_server import HubServer, hub_server
from tests.object_store import object_store


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileStore]:
    with object_store() as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        running.files().makedirs("unit", exist_ok=True)
        store = open_store("s3://unit/there")
        assert isinstance(store, FileStore)
        yield store


def test_large_files_are_compared_by_the_checksums_of_their_parts(
    bucket: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "PART_BYTES", 5 * 2**20)
    (tmp_path / "large").write_bytes(bytes(range(256)) * 45_000)
    (tmp_path / "small").write_bytes(b"small")
    sent: list[str] = []
    files = {"run/large": tmp_path / "large", "run/small": tmp_path / "small"}
    bucket.put(files, sent.append)
    assert sent == ["run/large", "run/small"]
    assert bucket.files("run") == {"large": 45_000 * 256, "small": 5}
    monkeypatch.setattr(bucket, "_read_back_equals", lambda path, file: pytest.fail("read back"))
    bucket.put(files, sent.append)  # equal by size and checksum: not sent again
    assert len(sent) == 2
    (tmp_path / "small").write_bytes(b"other")
    monkeypatch.setattr(bucket, "_read_back_equals", lambda path, file: False)
    monkeypatch.setattr(bucket, "_send", lambda name, file: None)
    with pytest.raises(StoreError, match="did not arrive"):
        bucket.put({"run/small": tmp_path / "small"}, sent.append)


def test_a_store_whose_checksums_are_of_something_else_is_read_back(
    bucket: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "_their_sum", lambda info: "0" * 32)
    (tmp_path / "file").write_bytes(b"encrypted there")
    bucket.put({"run/file": tmp_path / "file"}, lambda name: None)
    assert bucket.reads_back is True
    bucket.remove("run")
    bucket.remove("run")
    assert bucket.files("run") == {}


def test_a_folder_is_tried_and_not_made_and_its_volume_has_to_be_there(tmp_path: Path) -> None:
    try_out(str(tmp_path / "new"))
    try_out(str(tmp_path))
    with pytest.raises(StoreError, match="is the volume mounted") as lost:
        try_out(f"file://{tmp_path}/mnt/typo/x")
    assert f"there is no folder {tmp_path}/mnt/typo" in str(lost.value)
    assert lost.value.fix.startswith("Mount the volume")
    assert list(tmp_path.iterdir()) == []


def test_a_copy_in_a_folder_is_compared_byte_by_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"file://{tmp_path}/store")
    (tmp_path / "file").write_bytes(b"right")
    store.put({"deep/down/file": tmp_path / "file"}, lambda name: None)
    assert store.files("deep") == {"down/file": 5}
    (tmp_path / "store/deep/down/file").write_bytes(b"wrong")
    sent: list[str] = []
    store.put({"deep/down/file": tmp_path / "file"}, sent.append)
    assert sent == ["deep/down/file"]
    assert store.read("deep/down/file") == b"right"
    monkeypatch.setattr(store, "_send", lambda name, file: None)
    (tmp_path / "store/deep/down/file").write_bytes(b"wrong")
    with pytest.raises(StoreError, match="did not arrive"):
        store.put({"deep/down/file": tmp_path / "file"}, sent.append)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.address)
        monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_token")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub_store, "reachable", lambda: True)
        yield running


def test_a_repository_is_made_private_and_takes_files_in_one_commit(hub: HubServer, tmp_path: Path) -> None:
    try_out("hub://me/runs/")
    assert hub.made[0]["visibility"] == "private"
    assert hub.files == {}
    store = open_store("hub://me/runs")
    (tmp_path / "optimizer.pt").write_bytes(b"large")
    (tmp_path / "config.yaml").write_bytes(b"small")
    files = {"run/deep/optimizer.pt": tmp_path / "optimizer.pt", "run/config.yaml": tmp_path / "config.yaml"}
    sent: list[str] = []
    hub.commits.clear()
    store.put(files, sent.append)
    store.put(files, sent.append)
    assert hub.commits == [list(files)]
    assert sent == list(files)
    assert store.files("run") == {"deep/optimizer.pt": 5, "config.yaml": 5}
    assert store.files("other") == {}
    assert store.read("run/config.yaml") == b"small"
    store.remove("run/config.yaml")
    assert list(hub.files) == ["run/deep/optimizer.pt"]
    store.remove("run")
    store.remove("run")
    assert hub.files == {}


def test_a_repository_that_is_public_takes_nothing(hub: HubServer) -> None:
    hub.private = False
    with pytest.raises(StoreError, match="me/runs is public") as refused:
        try_out("hub://me/runs")
    assert "Make it private" in refused.value.fix
    assert hub.commits == []


def test_what_the_disk_here_refuses_is_not_said_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store/file").write_bytes(b"content")
    store = open_store(f"file://{tmp_path}/store")
    assert isinstance(store, FileStore)
    (tmp_path / "here/target").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        store.fetch("file", tmp_path / "here/target")
    with pytest.raises(StoreError, match="other"):
        store.fetch("other", tmp_path / "here/file")

    def full(*words: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.system, "get_file", full)
    with pytest.raises(OSError, match="No space left"):
        store.fetch("file", tmp_path / "here/file")


@pytest.mark.parametrize("name", ["run/optimizer.pt", "run/config.yaml"])
def test_a_file_that_arrives_damaged_in_a_repository_is_noticed(
    name: str, hub: HubServer, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"content")
    hub.damaging = name
    with pytest.raises(StoreError, match=name):
        open_store("hub://me/runs").put({name: tmp_path / "file"}, lambda name: None)


def test_a_store_that_takes_nothing_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(StoreError, match="nobody is logged in") as refused:
        try_out("hub://me/runs")
    assert "HF_TOKEN" in refused.value.fix
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_token")
    monkeypatch.setattr(hub_store, "reachable", lambda: False)
    with pytest.raises(StoreError, match="no connection to http") as refused:
        try_out("hub://me/runs")
    assert "network" in refused.value.fix
    monkeypatch.setattr("finetune.remote.store.PROBE_SECONDS", 0.1)
    hanging = SimpleNamespace(may_write=lambda: time.sleep(2))
    monkeypatch.setattr("finetune.remote.store.open_store", lambda address: hanging)
    with pytest.raises(StoreError, match="did not answer") as refused:
        try_out("s3://bucket")
    assert "network" in refused.value.fix
