"""A checkpoint is found only if every file is there as it was written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from finetune.errors import UserError
from finetune.paths import RunDir
from finetune.training.checkpoint import (
    MANIFEST,
    Found,
    cannot_write,
    damage,
    entry_of,
    newest_whole,
    publish,
    seal,
)
from finetune.training.lock import held
from finetune.training.state_files import Part, write_file

TENSORS = "state/rank-00001-000.safetensors"


def save(checkpoints: Path, step: int, keep: int = 9, best: int | None = None, without: str = "") -> Path:
    """Publish a checkpoint as two ranks leave it beside the others."""
    part = checkpoints / ".part" / f"checkpoint-{step}"
    (part / "state").mkdir(parents=True)
    small = {0: ["trainer_state.json", "state.json", "rng_state_0.pth"], 1: ["rng_state_1.pth"]}
    for rank, names in small.items():
        own = [f"state/rank-{rank:05d}-000.safetensors", *names]
        for name in own:
            (part / name).write_bytes(b"w" * 1000)
        seal(part, rank, {name: entry_of(part / name) for name in own if name != without})
    publish(part, checkpoints, keep, {"num_processes": 2, "best": best and {"step": best}})
    return checkpoints / f"checkpoint-{step}"


def cut(folder: Path) -> None:
    (folder / TENSORS).write_bytes(b"w" * 500)


def flip(folder: Path) -> None:
    (folder / TENSORS).write_bytes(b"w" * 999 + b"v")


def lose(folder: Path) -> None:
    (folder / "state.json").unlink()


def unseal(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def garble(folder: Path) -> None:
    (folder / MANIFEST).write_text("{")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (cut, f"{TENSORS} has 500 bytes instead of 1000"),
        (flip, f"{TENSORS} has changed"),
        (lose, "state.json is missing"),
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


def test_the_newest_is_the_one_of_the_latest_step_whatever_the_clock_said(tmp_path: Path) -> None:
    older, newer = save(tmp_path, 9), save(tmp_path, 10)
    os.utime(newer, (0, 0))
    os.utime(newer / MANIFEST, (0, 0))
    assert newest_whole(tmp_path) == Found(newer, 10)
    save(tmp_path, 11, keep=2)
    assert not older.exists()


def test_folders_that_are_no_checkpoints_are_not_looked_at(tmp_path: Path) -> None:
    for name in ("checkpoint-x", ".part", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-99").mkdir()
    assert newest_whole(tmp_path) == [f"checkpoint-99: {damage(tmp_path / 'checkpoint-99')}"]


def test_old_ones_go_when_the_new_one_is_there_but_the_best_stays(tmp_path: Path) -> None:
    for step in (6, 7, 8):
        save(tmp_path, step, keep=5)
    assert len(list(tmp_path.iterdir())) == 3
    for step in (9, 10, 11):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-11"]
    for step in (12, 13, 14):
        save(tmp_path, step, keep=1, best=12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-12", "checkpoint-14"]
    assert damage(tmp_path / "checkpoint-14") == ""


def test_a_save_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = save(tmp_path, 1)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("finetune.training.checkpoint._bring_to_disk", full)
    with pytest.raises(OSError, match="No space left on device"):
        save(tmp_path, 2, keep=1)
    assert newest_whole(tmp_path) == Found(older, 1)
    told = str(cannot_write(tmp_path, OSError(28, "No space left on device")))
    assert "No space left on device" in told
    assert f"The last whole one is {older}" in told


@pytest.mark.parametrize("name", ["trainer_state.json", "state.json", "rng_state_1.pth", TENSORS])
def test_a_save_that_lacks_a_part_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    whole = save(tmp_path, 1)
    with pytest.raises(OSError, match="the libraries have not written"):
        save(tmp_path, 2, without=name)
    assert newest_whole(tmp_path) == Found(whole, 1)


def test_what_does_not_read_back_as_it_was_written_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part({"weight/a@0": torch.zeros(4)}, {"weight/a": "[4]"})
    write_file(tmp_path / "state" / "good", part)
    monkeypatch.setattr("finetune.training.checkpoint.checksum", lambda file: "other")
    with pytest.raises(OSError, match="does not read back as it was written"):
        write_file(tmp_path / "state" / "bad", part)


def test_a_kill_while_one_takes_the_place_of_another_loses_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = save(tmp_path, 5)
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if self.parent.name == ".part":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 5)
    assert not whole.exists()
    monkeypatch.undo()
    assert newest_whole(tmp_path) == Found(whole, 5)


def test_a_rank_that_cannot_write_says_so_to_the_one_that_waits(tmp_path: Path) -> None:
    part = tmp_path / ".part" / "checkpoint-1"
    part.mkdir(parents=True)
    seal(part, 0, {})
    (part / ".failed-1").write_text("[Errno 28] No space left on device")
    with pytest.raises(OSError, match="No space left on device"):
        publish(part, tmp_path, 2, {"num_processes": 2})


def test_the_same_step_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    save(tmp_path, 5)
    save(tmp_path, 6)
    (save(tmp_path, 5) / TENSORS).stat()
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
