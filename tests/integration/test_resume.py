"""Going on after a crash, as a user does it: by name, by path, and what is refused."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from statistics import median_high
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune.training.checkpoint import entry_of
from tests.front_door import REPOSITORY, Outcome, assert_all_gone, finetune, started

WORDS = ["recipe=tiny_lora", "data.train.0.limit=40", "trainer.max_steps=8", "launch.device=cpu"]
EVERY_STEP = ["checkpoint.every_steps=1", "checkpoint.keep=3"]
TINY_ROWS = REPOSITORY / "finetune" / "embedded" / "behaviour.jsonl"
AUTO = "checkpoint.resume=auto"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    outcome = finetune(*WORDS, *EVERY_STEP, at=tmp_path_factory.mktemp("straight"))
    assert outcome.code == 0, outcome.err
    return outcome


def crashed(straight: Outcome, at: Path, name: str = "run") -> Path:
    """The straight run's folder as a crash before the end leaves it."""
    folder = at / "runs" / name
    shutil.copytree(straight.path, folder, ignore=shutil.ignore_patterns("model", "report.json"))
    return folder


def test_a_run_that_was_killed_goes_on_by_its_name(straight: Outcome, tmp_path: Path) -> None:
    with started(*WORDS, *EVERY_STEP, AUTO, at=tmp_path) as (process, run):
        until = time.monotonic() + 60
        while not (run.path / "checkpoints" / "checkpoint-2").exists():
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
        process.wait()
        assert_all_gone(run.path)
        assert not (run.path / "model").exists()
    again = finetune(*WORDS, *EVERY_STEP, AUTO, at=tmp_path)
    assert again.code == 0, again.err
    assert "resume    from step" in again.out
    assert again.losses == straight.losses
    assert again.report["status"] == "completed"
    done = finetune(*WORDS, *EVERY_STEP, AUTO, at=tmp_path)
    assert done.code == 0
    assert "it is completed, there is nothing to do" in done.out
    assert "starts again" not in done.out


def test_a_damaged_checkpoint_is_passed_over_and_named(straight: Outcome, tmp_path: Path) -> None:
    folder = crashed(straight, tmp_path)
    (folder / "checkpoints" / "checkpoint-8" / "state.json").unlink()
    (folder / "checkpoints" / "checkpoint-7" / "manifest.json").unlink()
    (folder / "checkpoints" / "checkpoint-99").mkdir()
    again = finetune(*WORDS, *EVERY_STEP, AUTO, at=tmp_path)
    assert again.code == 0, again.err
    assert "passed over checkpoint-8: state.json is missing" in again.out
    assert "passed over checkpoint-99: it has no manifest.json" in again.out
    assert "from step 6" in again.out
    assert again.losses == straight.losses


def test_what_cannot_be_gone_on_with_is_refused_and_left_alone(straight: Outcome, tmp_path: Path) -> None:
    folder = crashed(straight, tmp_path)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    changed = [*WORDS, "trainer.learning_rate=1e-4", "seed=1", "trainer.global_batch_size=8", AUTO]
    changed.append(
        "checkpoint.allow_changes=[trainer.learning_rate]"
    )  # the optimizer would bring the old one
    refused = finetune(*changed, at=tmp_path)
    assert refused.code == 2
    for part in (
        "3 problems",
        "trainer.learning_rate=0.0001",
        "seed=1",
        "global batch 8",
        "adapter.init_from",
    ):
        assert part in refused.err, refused.err
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join((TINY_ROWS.read_text(encoding="utf-8").splitlines(keepends=True))[:30]))
    fewer = finetune(*WORDS, f"data.train.0.path={rows}", AUTO, at=tmp_path)
    assert fewer.code == 2
    assert "data.train.0.path" in fewer.err
    (folder / "checkpoints" / "checkpoint-8" / "state.json").unlink()
    named = finetune(*WORDS, f"checkpoint.resume={folder}/checkpoints/checkpoint-8", at=tmp_path)
    assert named.code == 2
    assert "state.json is missing" in named.err
    assert "run_name" in finetune(*WORDS, AUTO, "--dry-run", at=tmp_path).err
    (folder / "checkpoints" / "checkpoint-8" / "state.json").touch()
    for path, content in before.items():
        assert path.read_bytes() == content or path.match("checkpoint-8/state.json"), path


def test_what_is_pickled_is_never_run(straight: Outcome, tmp_path: Path) -> None:
    folder = crashed(straight, tmp_path)
    checkpoint = folder / "checkpoints" / "checkpoint-8"
    shutil.rmtree(folder / "checkpoints" / "checkpoint-7")
    checkpoint = checkpoint.rename(folder / "checkpoints" / "checkpoint-7")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    (checkpoint / "trainer_state.json").write_text(json.dumps(state | {"global_step": 7}))
    torch.save(Touch(tmp_path / "touched"), checkpoint / "rng_state.pth")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name in ("rng_state.pth", "trainer_state.json"):
        manifest["files"][name] = entry_of(checkpoint / name)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    again = finetune(*WORDS, *EVERY_STEP, AUTO, at=tmp_path)
    assert again.code == 1
    assert "are no plain numbers, and nothing else is ever unpickled" in again.err
    assert "Traceback" not in again.err
    assert not (tmp_path / "touched").exists()


class Touch:
    """Makes a file when it is unpickled without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_an_allowed_change_goes_on_from_a_path(straight: Outcome, tmp_path: Path) -> None:
    folder = crashed(straight, tmp_path)
    shutil.rmtree(folder / "checkpoints" / "checkpoint-8")
    shutil.rmtree(folder / "checkpoints" / "checkpoint-7")
    earlier = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    earlier[1]["memory_resident_bytes"] = [10**12]
    lines = [json.dumps(step) for step in earlier]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 9, "los']))  # cut off by the crash
    allowed = "checkpoint.allow_changes=[trainer.max_grad_norm]"
    words = [*WORDS, f"checkpoint.resume={folder}", "trainer.max_grad_norm=0.001", allowed]
    again = finetune(*words, at=tmp_path, name="run")
    assert again.code == 0, again.err
    assert [step["step"] for step in again.steps] == list(range(1, 9))
    assert again.losses[:7] == straight.losses[:7]
    assert again.losses[7] != straight.losses[7]
    assert json.loads((folder / "resume.json").read_text())["step"] == 6
    starts = [json.loads(line) for line in (folder / "times.jsonl").read_text().splitlines()]
    assert [start["behind"] for start in starts if "started" in start] == [0, 6]
    report = again.report
    planned = [start["planned"] for start in starts if "started" in start]
    assert planned == [report["memory"]["planned_bytes"]] * 2
    assert report["memory"]["measured_bytes"] == [{"resident": 10**12}]
    warm = [step["tokens_per_second"] for step in again.steps if step["step"] not in (1, 7)]
    assert report["tokens_per_second"] == median_high(warm)
    seconds = again.steps[-1]["tokens"] / 8 / report["tokens_per_second"]
    assert report["forecast"]["step_seconds"]["measured"] == pytest.approx(seconds)


def test_a_completed_run_is_made_longer_only_if_that_is_allowed(straight: Outcome, tmp_path: Path) -> None:
    shutil.copytree(straight.path, tmp_path / "runs" / "run")
    longer = [*WORDS[:2], "trainer.max_steps=10", "launch.device=cpu", AUTO]
    refused = finetune(*longer, at=tmp_path)
    assert refused.code == 2
    assert "trainer.max_steps=10: the run was begun with 8" in refused.err
    again = finetune(*longer, "checkpoint.allow_changes=[trainer.max_steps]", at=tmp_path)
    assert again.code == 0, again.err
    assert "differs, as allowed: trainer.max_steps: 8 -> 10" in again.out
    assert [step["step"] for step in again.steps] == list(range(1, 11))
    assert len(list(again.path.glob("model-step-8-*/adapter_model.safetensors"))) == 1
    assert again.report["status"] == "completed"


def test_a_run_killed_behind_its_last_step_saves_its_model_and_makes_no_step_more(
    straight: Outcome, tmp_path: Path
) -> None:
    crashed(straight, tmp_path)
    again = finetune(*WORDS, *EVERY_STEP, AUTO, at=tmp_path)
    assert again.code == 0, again.err
    assert again.losses == straight.losses
    ours, theirs = (load_file(o.path / "model" / "adapter_model.safetensors") for o in (again, straight))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    emptied = tmp_path / "runs" / "run"
    shutil.rmtree(emptied / "checkpoints")
    (emptied / "checkpoints").mkdir()
    done = finetune(*WORDS, *EVERY_STEP, AUTO, at=tmp_path)
    assert done.code == 0
    assert "there is nothing to do" in done.out
    assert (emptied / "model" / "adapter_model.safetensors").exists()
