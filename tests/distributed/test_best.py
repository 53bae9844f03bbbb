"""The best checkpoint stays, early stopping ends a run, `model/` holds the best weights, resumed or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finetune.model.state import WEIGHT, SavedState
from tests.distributed.test_resume import EMBEDDED, interrupted
from tests.front_door import Outcome, finetune, in_world

WORDS = [
    *("recipe=tiny_lora", "data.train.0.limit=40", "trainer.max_steps=40", "trainer.learning_rate=2e-2"),
    f"data.eval=[{{path: {EMBEDDED}/behaviour_eval.jsonl, limit: 20}}]",
    *("trainer.eval_strategy=steps", "trainer.eval_steps=2", "checkpoint.best=eval_loss"),
    *("checkpoint.early_stopping_patience=3", "checkpoint.keep=1"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """One run a strategy, and one that goes on from a checkpoint behind its best evaluation."""
    at = tmp_path_factory.mktemp("best")
    zero3 = [*WORDS, "distributed=zero3", "checkpoint.every_steps=1"]
    gathered = "distributed.reshard_after_forward=false"  # an evaluation leaves the weights so
    cases = {
        "fsdp": [*WORDS, "distributed=fsdp", gathered, "trainer.bf16=true"],
        "zero3": [*zero3, "checkpoint.keep=30"],
    }
    found = in_world(cases, 2, at)
    interrupted(found["zero3"], at / "runs" / "resumed", at=found["zero3"].report["best"]["step"] + 3)
    return found | in_world({"resumed": [*zero3, "checkpoint.resume=auto"]}, 2, at)


@pytest.mark.parametrize("name", ["fsdp", "zero3", "resumed"])
def test_the_best_evaluation_is_what_is_handed_over(name: str, runs: dict[str, Outcome]) -> None:
    outcome = runs[name]
    lines = (outcome.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    evaluations = {
        entry["step"]: entry["eval_loss"] for entry in map(json.loads, lines) if "eval_loss" in entry
    }
    step = min(evaluations, key=lambda at: evaluations[at])
    assert outcome.report["best"] == {"metric": "eval_loss", "value": evaluations[step], "step": step}
    assert outcome.report["stopped_early"] is True
    assert list(evaluations) == list(range(2, step + 7, 2))  # three without a better one, and no more
    assert outcome.report["steps"] == step + 6
    kept = {path.name for path in (outcome.path / "checkpoints").iterdir()}
    assert kept == {f"checkpoint-{step}", f"checkpoint-{step + 6}"} or name == "zero3"
    best = SavedState(outcome.path / "checkpoints" / f"checkpoint-{step}")
    saved = load_file(outcome.path / "model" / "adapter_model.safetensors")
    assert len(saved) == len(best.names(WEIGHT))
    for parameter in best.names(WEIGHT):
        assert torch.equal(saved[parameter.replace(".default", "")], best.whole(WEIGHT, parameter)), parameter
    assert all(check["passed"] for check in outcome.report["verified"])


def test_a_checkpoint_behind_an_evaluation_holds_the_optimizer_too(runs: dict[str, Outcome]) -> None:
    state = SavedState(next(iter(sorted((runs["fsdp"].path / "checkpoints").iterdir()))))
    assert len(state.names("exp_avg")) == len(state.names(WEIGHT)) > 0
    assert {state.whole(WEIGHT, name).dtype for name in state.names(WEIGHT)} == {torch.float32}


def test_a_resumed_run_stops_at_the_same_evaluation(runs: dict[str, Outcome]) -> None:
    assert runs["resumed"].losses == runs["zero3"].losses
    assert runs["resumed"].report["best"] == runs["zero3"].report["best"]


def test_what_cannot_be_the_best_is_refused(tmp_path: Path) -> None:
    words = [*WORDS[:4], "launch.device=cpu", "--dry-run"]
    early = finetune(*words, "checkpoint.early_stopping_patience=2", at=tmp_path)
    assert early.code == 2
    assert "Set checkpoint.best=eval_loss" in early.err
    nothing = finetune(*words, "checkpoint.best=eval_loss", at=tmp_path)
    assert "there are no rows for evaluation" in nothing.err
    never = finetune(*words, "checkpoint.best=eval_loss", "data.eval_fraction=0.2", at=tmp_path)
    assert "Set trainer.eval_strategy=steps" in never.err
    other = finetune(*words, "checkpoint.best=accuracy", at=tmp_path)
    assert "must be eval_loss" in other.err
