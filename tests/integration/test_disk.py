"""A disk that is too small or full: foreseen, survived, and the last whole checkpoint stays."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from finetune.training.checkpoint import Found, newest_whole
from tests.front_door import finetune, started, wait_for_step

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")

LORA = ["recipe=tiny_lora", "launch.device=cpu", "data.train.0.limit=40"]
ONE_MB = 2**20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A folder whose `runs` lies on a disk of 16 MB; a checkpoint of the tiny adapter takes 3."""
    runs = tmp_path / "runs"
    runs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(runs)], check=True)
    yield tmp_path
    subprocess.run(["umount", "-l", str(runs)], check=True)


def test_a_disk_that_is_too_small_is_told_before_it_is_full(small: Path) -> None:
    full = finetune("recipe=tiny_full", *LORA[1:], "trainer.max_steps=4", at=small)
    assert full.code == 2
    assert "3 checkpoints of 0.017 GB will be there at once: checkpoint.keep=2" in full.err
    assert not full.path.exists()
    many = finetune(*LORA, "trainer.max_steps=4", "checkpoint.keep=8", at=small)
    assert many.code == 2
    assert "9 checkpoints of 0.003 GB" in many.err
    assert "lower checkpoint.keep" in many.err
    assert not (many.path / "metrics.jsonl").exists()  # behind the first step, before anything is recorded


def test_a_disk_that_fills_up_costs_no_checkpoint_and_no_run_until_the_last_save(small: Path) -> None:
    words = [*LORA, "trainer.max_steps=100000", "checkpoint.every_steps=5", "checkpoint.keep=1"]
    with started(*words, at=small) as (process, run):
        checkpoints, filler, log = run.path / "checkpoints", small / "runs" / "filler", run.path / "logs"
        wait_for_step(run.path, 6)
        until(lambda: isinstance(newest_whole(checkpoints), Found))
        fill(filler)
        until(lambda: "no room for a checkpoint at step" in (log / "rank-0.log").read_text())
        kept = newest_whole(checkpoints)
        assert isinstance(kept, Found)
        filler.unlink()
        until(lambda: step(checkpoints) > kept.step)  # it goes on, and saves again when there is room
        fill(filler)
        process.terminate()
        out, err = process.communicate(timeout=60)
        assert process.returncode == 1, out + err
        assert "a checkpoint takes 0.003 GB" in out + err
        assert f"The last whole one is {checkpoints}/checkpoint-{step(checkpoints)}" in out + err
        assert not (run.path / "model").exists()


def fill(filler: Path) -> None:
    """Leave less room than a checkpoint takes, right behind a save."""
    disk = os.statvfs(filler.parent)
    filler.write_bytes(b"0" * (disk.f_bavail * disk.f_frsize - 2 * ONE_MB))


def step(checkpoints: Path) -> int:
    found = newest_whole(checkpoints)
    return found.step if isinstance(found, Found) else 0


def until(so: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
