"""A checkpoint is found only if every file is there as it was written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.errors import RunFailed, UserError
from finetune.paths import RunDir
from finetune.training.checkpoint import MANIFEST, Found, damage, newest_whole, publish
from finetune.training.lock import held


def save(checkpoints: Path, step: int, keep: int = 9) -> Path:
    """Publish a checkpoint as a save leaves it beside the others."""
    part = checkpoints / ".part" / f"checkpoint-{step}"
    (part / "deep").mkdir(parents=True)
    (part / "weights.safetensors").write_bytes(b"w" * 1000)
    (part / "deep" / "optimizer.pt").write_bytes(b"o" * 10)
    for name in ("trainer_state.json", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):
        (part / name).write_bytes(b"x")
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
    for step in (6, 7, 8):
        save(tmp_path, step, keep=5)
    assert len(list(tmp_path.iterdir())) == 3
    for step in (9, 10, 11):
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


@pytest.mark.parametrize(
    "name", ["trainer_state.json", "scheduler.pt", "rng_state_1.pth", "deep/optimizer.pt"]
)
def test_a_save_that_lacks_a_part_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    whole = save(tmp_path, 1)
    part = tmp_path / ".part" / "checkpoint-2"
    shutil.copytree(whole, part)
    (part / name).unlink()
    with pytest.raises(RunFailed, match="the libraries have not written"):
        publish(part.parent, tmp_path, 2, 9, {"num_processes": 2})
    assert newest_whole(tmp_path) == Found(whole, 1)


def test_the_same_step_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    save(tmp_path, 5)
    save(tmp_path, 6)
    (save(tmp_path, 5) / "weights.safetensors").stat()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-5", "checkpoint-6"]


def test_the_one_just_written_is_never_dropped(tmp_path: Path) -> None:
    for step in (7, 8, 9):
        save(tmp_path, step, keep=3)
    save(tmp_path, 6, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-6"]


def test_one_process_at_a_time_holds_a_folder(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    with held(run_dir), pytest.raises(UserError, match="another process is at work in it"), held(run_dir):
        pass
    with held(run_dir):
        pass
