"""Uploading to the hub: private when new, compared afterwards, and the folder is named when it fails."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from finetune import hub
from finetune.errors import Problem, RunFailed


class FakeHub:
    """The calls that a push makes; `lost` is a file that does not arrive whole."""

    held: tuple[str, ...] = ()
    lost = ""
    made: dict[str, Any] = {}  # noqa: RUF012 - one hub for all instances

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def repo_exists(self, name: str) -> bool:
        return bool(self.held)

    def list_repo_files(self, name: str) -> list[str]:
        return list(self.held)

    def create_repo(self, name: str, **options: Any) -> None:
        self.made[name] = options

    def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str) -> None:
        files = [file for file in folder_path.iterdir() if file.name != self.lost]
        self.made["files"] = [SimpleNamespace(rfilename=f.name, size=f.stat().st_size) for f in files]

    def model_info(self, name: str, files_metadata: bool) -> Any:
        return SimpleNamespace(siblings=self.made["files"])


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeHub]:
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "a token")
    monkeypatch.setattr(hub, "reachable", lambda: True)
    monkeypatch.setattr(FakeHub, "made", {})
    return FakeHub


def test_a_push_is_private_and_whole(fake: type[FakeHub], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    problems: list[Problem] = []
    hub.check_push("hub://me/x", problems)
    assert problems == []
    assert hub.push(tmp_path, "hub://me/x") == f"{hub.endpoint()}/me/x"
    assert fake.made["me/x"] == {"private": True, "exist_ok": True}


def test_a_file_that_did_not_arrive_is_noticed(
    fake: type[FakeHub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    monkeypatch.setattr(fake, "lost", "model.safetensors")
    with pytest.raises(RunFailed, match=rf"not whole on the hub: model.safetensors(?s:.*){tmp_path}"):
        hub.push(tmp_path, "hub://me/x")


def test_a_model_on_the_hub_is_not_overwritten(fake: type[FakeHub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "held", ("model.safetensors",))
    problems: list[Problem] = []
    hub.check_push("hub://me/x", problems)
    assert "holds a model already" in str(problems[0])
