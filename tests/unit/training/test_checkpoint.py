"""A checkpoint is found only if every file is there as it was written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.errors import RunFailed
from finetune.training.checkpoint import MANIFEST, Found, damage, newest_whole, publish


def save(checkpoints: Path, step: int, keep: int = 9) -> Path:
    """Publish a checkpoint as a save leaves it beside the others."""
    part = checkpoints / ".part" / f"checkpoint-{step}"
    (part / "deep").mkdir(parents=True)
    (part / "weights.safetensors").write_bytes(b"w" * 1000)
    (part / "deep" / "optimizer.pt").write_bytes(b"o" * 10)
    (part / "training_args.bin").write_bytes(b"hub token")
    publish(part.parent, checkpoints, step, keep, {"num_processes": 2})
    return checkpoints / f"checkpoint-{step}"


def cut(folder: Path) -> None:
    (folder / "weights.safetensors").write_bytes(b"w" * 500)


def flip(folder: Path) -> None:
    (folder / "weights.safetensors").write_bytes(b"w" * 999 + b"v")


def lose(folder: Path) -> None:
    (folder / "deep" / "optimizer.pt").unlink()


def unseal(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def garble(folder: Path) -> None:
    (folder / MANIFEST).write_text("{")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (cut, "weights.safetensors has 500 bytes instead of 1000"),
        (flip, "weights.safetensors has changed"),
        (lose, "deep/optimizer.pt is missing"),
        (unseal, "the save was not finished"),
        (garble, "cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(
    spoil: Callable[[Path], None], why: str, tmp_path: Path
) -> None:
    older, newer = save(tmp_path, 9), save(tmp_path, 10)
    assert newest_whole(tmp_path) == Found(newer, 10)
    spoil(newer)
    found = newest_whole(tmp_path)
    assert isinstance(found, Found)
    assert (found.path, found.step) == (older, 9)
    assert why in found.skipped[0]
    assert found.skipped[0].startswith("checkpoint-10: ")
    spoil(older)
    left = newest_whole(tmp_path)
    assert isinstance(left, list)
    assert len(left) == 2


def test_folders_that_are_no_checkpoints_are_not_looked_at(tmp_path: Path) -> None:
    for name in ("checkpoint-x", ".part", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-99").mkdir()
    assert newest_whole(tmp_path) == [f"checkpoint-99: {damage(tmp_path / 'checkpoint-99')}"]


def test_old_ones_go_when_the_new_one_is_there_and_arguments_are_not_kept(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-11"]
    assert not list(tmp_path.rglob("training_args.bin"))
    assert damage(tmp_path / "checkpoint-11") == ""


def test_a_save_that_fails_leaves_the_old_one_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = save(tmp_path, 1)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("finetune.training.checkpoint.os.fsync", full)
    with pytest.raises(RunFailed, match=r"(?s)No space left on device.*The last whole one is .*checkpoint-1"):
        save(tmp_path, 2, keep=1)
    assert newest_whole(tmp_path) == Found(older, 1)
