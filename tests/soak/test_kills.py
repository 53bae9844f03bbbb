"""Kills at random moments, six of a run: before its first step, between steps, while a checkpoint is saved;
and twenty of one that is about to begin.

`FINETUNE_SOAK_SEED=N` (printed by each run of it) draws the same moments again.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finetune.training.checkpoint import Found, damage, newest_whole, numbered
from tests.front_door import (
    Outcome,
    assert_all_gone,
    finetune,
    in_world,
    kill_all,
    started,
    steps_logged,
    wait_for,
)

STEPS, KILLS = 40, 6
STRATEGIES = ["single", "ddp", "fsdp", "zero2", "zero3"]
EARLY, BETWEEN, SAVING = "before a step", "between steps", "while saving"
PLAN = [EARLY, BETWEEN, BETWEEN, SAVING, SAVING, SAVING]
"""What the kills of a run aim at, in an order that is drawn: a start makes a few of the steps."""
EARLY_SECONDS, OPENING_SECONDS = (0.2, 9.0), (0.3, 4.0)
SEED = int(os.environ.get("FINETUNE_SOAK_SEED") or time.time())

pytestmark = pytest.mark.soak


@dataclass(frozen=True, slots=True)
class Kill:
    """Where a kill struck."""

    aim: str
    seconds: float
    steps: int
    in_save: bool
    whole: int
    """Step of the newest whole checkpoint that is left; 0: none."""

    def __str__(self) -> str:
        struck = "in a save" if self.in_save else "in no save"
        after = f"{self.seconds:5.1f} s after the start"
        return f"{self.aim:<13} {after}, {self.steps:2} steps, {struck}, whole: {self.whole}"


def processes(strategy: str) -> int:
    return 1 if strategy == "single" else 2


def words(strategy: str) -> list[str]:
    return [
        *("recipe=tiny_lora", f"distributed={strategy}", "data.train.0.limit=40", "adapter.lora_dropout=0.1"),
        *(f"trainer.max_steps={STEPS}", "checkpoint.every_steps=1", "checkpoint.keep=2"),
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    outcomes = {}
    for count in (1, 2):
        cases = {name: words(name) for name in STRATEGIES if processes(name) == count}
        outcomes |= in_world(cases, count, tmp_path_factory.mktemp(f"uninterrupted-{count}"))
    return outcomes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_that_is_killed_again_and_again_equals_one_that_never_was(
    strategy: str,
    uninterrupted: dict[str, Outcome],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def tell(line: object) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{strategy}: {line}")
            sys.stdout.flush()

    draw = random.Random(f"{SEED} {strategy}")
    again = [*words(strategy), f"launch.num_processes={processes(strategy)}", "launch.device=cpu"]
    again.append("checkpoint.resume=auto")
    tell(f"FINETUNE_SOAK_SEED={SEED}")
    kills: list[Kill] = []
    for aim in draw.sample(PLAN, len(PLAN)):
        kills.append(kill_once(again, aim, draw, tmp_path))
        tell(kills[-1])
        assert kills[-1].whole >= max((kill.whole for kill in kills), default=0), "a checkpoint was lost"
    assert len(kills) == KILLS
    assert any(kill.in_save for kill in kills)
    assert max(kill.steps for kill in kills) < STEPS
    ended = finetune(*again, at=tmp_path)
    assert ended.code == 0, ended.out + ended.err
    tell(f"{len(kills)} kills, {sum(kill.in_save for kill in kills)} of them in a save; then it ended well")
    assert_equal(ended, uninterrupted[strategy])
    assert ended.report["strategy"]["actual"] == strategy
    assert ended.report["num_processes"]["actual"] == processes(strategy)


def test_kills_while_a_run_is_opened_and_its_data_prepared(
    uninterrupted: dict[str, Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    draw = random.Random(f"{SEED} opening")
    again = [*words("single"), "launch.device=cpu", "checkpoint.resume=auto"]
    for cache in range(4):
        monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / f"cache-{cache}"))
        kills = [kill_once(again, EARLY, draw, tmp_path, OPENING_SECONDS) for _ in range(5)]
        with capsys.disabled():
            sys.stdout.write("".join(f"\nopening: {kill}" for kill in kills))
    ended = finetune(*again, at=tmp_path)
    assert ended.code == 0, ended.out + ended.err
    assert_equal(ended, uninterrupted["single"])


def kill_once(
    again: list[str],
    aim: str,
    draw: random.Random,
    at: Path,
    early: tuple[float, float] = EARLY_SECONDS,
) -> Kill:
    """Start the run, or go on with it, and end all of its processes at a moment that is drawn."""
    checkpoints = at / "runs" / "run" / "checkpoints"
    before, begun = newest_step(checkpoints), time.monotonic()
    saving = new_saves(checkpoints / ".part")
    with started(*again, at=at) as (process, run):

        def wait(what: str, there: Callable[[], bool], pause: float) -> None:
            wait_for(what, lambda: there() or process.poll() is not None, pause=pause)

        if aim == EARLY:
            until = begun + draw.uniform(*early)
            wait(
                "end of a pause", lambda: time.monotonic() > until or newest_step(checkpoints) > before, 0.01
            )
        elif aim == BETWEEN:
            target = before + draw.randint(1, 3)
            wait(f"checkpoint {target}", lambda: newest_step(checkpoints) >= target, 0.01)
            time.sleep(draw.uniform(0, 0.3))
        else:
            count = draw.randint(1, 3)
            wait(f"save {count}", lambda: saving() >= count, 0.001)
            time.sleep(draw.choice([0, draw.uniform(0, 0.08)]))
        ended = process.poll()
        kill_all(process)
        in_save = bool(unfinished(checkpoints / ".part"))
        seconds = time.monotonic() - begun
        out, err = process.communicate()
        assert ended is None, f"it ended by itself with {ended}:\n{out}\n{err}"
        assert_all_gone(run.path)
    assert not (run.path / "model").exists()
    return Kill(aim, seconds, steps_logged(run.path), in_save, look_at(checkpoints))


def new_saves(part: Path) -> Callable[[], int]:
    """Counts the saves that were seen to begin; one that an earlier kill has left is none of them."""
    last, seen = unfinished(part), 0

    def count() -> int:
        nonlocal last, seen
        now = unfinished(part)
        last, seen = now, seen + len(now - last)
        return seen

    return count


def unfinished(part: Path) -> set[str]:
    try:
        return {entry.name for entry in part.iterdir()}
    except OSError:
        return set()


def newest_step(checkpoints: Path) -> int:
    names = [path.name for path in checkpoints.glob("checkpoint-*")]
    return max((int(name.partition("-")[2]) for name in names), default=0)


def look_at(checkpoints: Path) -> int:
    """Whatever is left is whole, or is known not to be; the step of the newest whole one."""
    if not checkpoints.exists():
        return 0
    for entry in checkpoints.iterdir():
        assert entry.name.startswith(("checkpoint-", ".part", ".aside-")), entry
    visible = numbered(checkpoints)
    broken = {folder.name for folder in visible if damage(folder)}
    found = newest_whole(checkpoints)
    if not isinstance(found, Found):
        assert len(broken) == len(visible) == len(found)
        return 0
    assert found.path.name not in broken
    return found.step


def assert_equal(ended: Outcome, straight: Outcome) -> None:
    assert [entry["step"] for entry in ended.steps] == list(range(1, STEPS + 1))
    for key in ("loss", "learning_rate", "grad_norm", "supervised_tokens", "tokens"):
        assert [entry[key] for entry in ended.steps] == [entry[key] for entry in straight.steps], key
    ours, theirs = (load_file(next((o.path / "model").glob("*.safetensors"))) for o in (ended, straight))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(check["passed"] for check in ended.report["verified"])
