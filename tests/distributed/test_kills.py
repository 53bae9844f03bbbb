"""A run on several processes that loses its power goes on by the same command, bit for bit.

Many more kills, at random moments, are in tests/soak/test_kills.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.front_door import Outcome, assert_all_gone, finetune, in_world, kill_all, started, wait_for

STEPS = 8
STRATEGIES = ["ddp", "fsdp", "zero3"]
OURS = ["launch.num_processes=2", "launch.device=cpu", "checkpoint.resume=auto"]


def words(strategy: str) -> list[str]:
    return [
        *("recipe=tiny_lora", f"distributed={strategy}", "data.train.0.limit=40"),
        *(f"trainer.max_steps={STEPS}", "checkpoint.every_steps=1", "checkpoint.keep=3"),
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return in_world({name: words(name) for name in STRATEGIES}, 2, tmp_path_factory.mktemp("uninterrupted"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_killed_run_goes_on_bit_for_bit(
    strategy: str, uninterrupted: dict[str, Outcome], tmp_path: Path
) -> None:
    with started(*words(strategy), *OURS, at=tmp_path) as (process, run):
        third = run.path / "checkpoints" / "checkpoint-3"
        wait_for("checkpoint", lambda: third.exists() or process.poll() is not None, pause=0.02)
        kill_all(process)
        assert_all_gone(run.path)
        assert not (run.path / "model").exists()
    again = finetune(*words(strategy), *OURS, at=tmp_path)
    assert again.code == 0, again.out + again.err
    step = re.search(r"resume    from step (\d+)", again.out)
    assert step is not None
    assert 3 <= int(step[1]) < STEPS
    assert again.report["strategy"]["actual"] == strategy
    assert again.report["num_processes"]["actual"] == 2
    assert again.report["status"] == "completed"
    assert [entry["step"] for entry in again.steps] == list(range(1, STEPS + 1))
    assert again.losses == uninterrupted[strategy].losses
