"""Ends that the user plans for: a checkpoint on demand, a machine that goes, commands at the end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.front_door import finetune, started, wait_for_step

LONG = ["recipe=tiny_lora", "trainer.max_steps=100000", "launch.device=cpu"]
TOLD = "echo $FINETUNE_STATUS $FINETUNE_EXIT_CODE $FINETUNE_STEPS >> {}/told.txt"


def test_a_checkpoint_on_demand_and_an_end_before_the_machine_goes(tmp_path: Path) -> None:
    hook = f"hooks.on_failure={TOLD.format(tmp_path)}"
    began = time.monotonic()
    with started(*LONG, "checkpoint.stop_at=45s", hook, at=tmp_path) as (process, run):
        wait_for_step(run.path, 1, seconds=40)
        (run.path / "SAVE_NOW").touch()
        while not list((run.path / "checkpoints").glob("checkpoint-*")):
            assert time.monotonic() < began + 40
            time.sleep(0.05)
        assert not (run.path / "SAVE_NOW").exists()
        out, err = process.communicate(timeout=60)
        assert time.monotonic() - began < 45
        assert process.returncode == 143, out + err
        assert "SAVE_NOW: saving a checkpoint" in out
        assert "stop_at: saving a checkpoint, then ending" in out
        assert "go on with: checkpoint.resume=auto run_name=run" in out
        assert (tmp_path / "told.txt").read_text().startswith("interrupted 143 ")
        assert len(list((run.path / "checkpoints").glob("checkpoint-*"))) == 2


def test_commands_at_the_end_are_told_how_it_ended_and_hide_nothing(tmp_path: Path) -> None:
    short = ["recipe=tiny_lora", "trainer.max_steps=2", "launch.device=cpu"]
    hooks = [f"hooks.on_end={TOLD.format(tmp_path)}; echo out; exit 3", "hooks.on_failure=touch wrong"]
    outcome = finetune(*short, *hooks, at=tmp_path)
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "told.txt").read_text() == "completed 0 2\n"
    assert "out" in outcome.out
    assert "hooks.on_end failed with exit code 3; the run's own result stands" in outcome.out
    assert not (outcome.path / "wrong").exists()


@pytest.mark.parametrize("text", ["soon", "2001-01-01T00:00"])
def test_a_stop_that_cannot_be_is_refused(text: str, tmp_path: Path) -> None:
    refused = finetune(*LONG, f"checkpoint.stop_at={text}", "--dry-run", at=tmp_path)
    assert refused.code == 2
    assert f"checkpoint.stop_at={text}" in refused.err
