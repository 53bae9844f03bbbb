"""What `train` does with the plan: it chooses, refuses what does not fit, and holds it against the run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.front_door import REPOSITORY, Outcome, environment, finetune

TOO_LARGE = ("recipe=qwen8b_full", "launch.device=cpu", "hardware.host_memory_gb=20")


def test_what_does_not_fit_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    done = finetune(*TOO_LARGE, at=tmp_path)
    assert done.code == 3
    assert "distributed=auto: " in done.err
    assert "and 20.0 GB are here" in done.err
    assert "adapter=qlora: " in done.err
    assert not done.path.parent.exists()
    goes_on = finetune(*TOO_LARGE, "plan.enforce=false", "--dry-run", at=tmp_path)
    assert goes_on.code == 0
    assert "WARNING" in goes_on.out


def test_buckets_that_are_never_filled_need_no_ram(tmp_path: Path) -> None:
    words = ("recipe=tiny_full", "distributed=zero2", "launch.device=cpu", "launch.num_processes=2")
    fits = finetune(*words, "hardware.host_memory_gb=3", "--dry-run", at=tmp_path)
    assert fits.code == 0, fits.err
    assert finetune(*words, "hardware.host_memory_gb=1", "--dry-run", at=tmp_path).code == 3


def test_a_run_is_planned_settled_and_measured(tmp_path: Path) -> None:
    words = (
        *("recipe=tiny_full", "launch.device=cpu", "launch.num_processes=2", "trainer.max_steps=3"),
        *("trainer.per_device_train_batch_size=auto", "trainer.activation_checkpointing=auto"),
    )
    done = finetune(*words, at=tmp_path)
    assert done.code == 0, done.err
    planned = json.loads((done.path / "plan.json").read_text())
    asked = finetune("plan", *words, "--json", at=tmp_path)
    assert planned == json.loads(asked.out)
    report = done.report
    assert report["strategy"]["actual"] == planned["chosen"]
    assert report["num_processes"]["actual"] == 2
    assert planned["why"].splitlines()[0] in done.out
    assert report["batch"]["per_device"] == planned["batch"]["per_device"] == 8
    assert "per_device_train_batch_size: 8" in (done.path / "config.yaml").read_text()
    bound = report["memory"]["planned_bytes"]["resident"]
    assert bound == planned["forecast"]["memory"]["resident"]
    taken = [own["resident"] for own in report["memory"]["measured_bytes"]]
    assert len(taken) == 2
    assert_compared(done, planned["forecast"])
    assert bound["expected"] / 2 < max(taken) <= bound["upper"]
    again = finetune(*words, "checkpoint.resume=auto", at=tmp_path)
    assert again.code == 0, again.err


def assert_compared(done: Outcome, planned: dict[str, Any]) -> None:
    """Every phase that is forecast was measured, and so were the step and its tokens."""
    forecast = done.report["forecast"]
    phases = forecast["memory"]["phases"]
    assert {"loading", "forward", "backward", "step", "between"} == set(phases)
    assert {n: phase["planned"] for n, phase in phases.items() if phase["planned"]} == planned["phases"]
    highest = max(phase["measured"] for phase in phases.values())
    assert highest == max(own["resident"] for own in done.report["memory"]["measured_bytes"])
    steps = [step["tokens"] for step in done.steps]
    largest = max(b - a for a, b in zip([0, *steps], steps, strict=False))
    assert largest / 2 <= forecast["micro_batch_tokens"]["measured"] <= largest
    assert forecast["micro_batch_tokens"]["measured"] <= forecast["micro_batch_tokens"]["planned"]
    assert forecast["step_seconds"]["measured"] > 0
    assert forecast["tokens_per_second"]["measured"] == done.report["tokens_per_second"]


def test_auto_needs_what_it_is_worked_out_from(tmp_path: Path) -> None:
    auto = ("recipe=tiny_full", "launch.device=cpu", "trainer.per_device_train_batch_size=auto", "--dry-run")
    without = finetune(*auto, "trainer.global_batch_size=null", at=tmp_path)
    assert without.code == 2
    assert "Set trainer.global_batch_size." in without.err
    twice = finetune(*auto, "trainer.gradient_accumulation_steps=2", at=tmp_path)
    assert twice.code == 2
    assert "Leave gradient_accumulation_steps out." in twice.err
    wrong = finetune("recipe=tiny_full", "trainer.per_device_train_batch_size=some", "--dry-run", at=tmp_path)
    assert wrong.code == 2
    assert "expected a whole number, or auto" in wrong.err


def test_a_model_of_unknown_sizes_is_run_without_a_plan_and_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    words = ("recipe=tiny_full", f"model.name_or_path={tmp_path}", "launch.device=cpu", "--dry-run")
    done = finetune(*words, at=tmp_path)
    assert done.code == 0, done.err
    assert "plan      none: " in done.out
    assert "distributed=auto is single with 1 process" in done.out
    auto = finetune(*words, "trainer.activation_checkpointing=auto", at=tmp_path)
    assert auto.code == 2
    assert "model.shape.hidden_size" in auto.err


def forecast_and_measured(*words: str) -> dict[str, dict[str, Any]]:
    """Bytes planned and bytes that a run on CPU processes allocated, by phase, for each strategy."""
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "memory.py"), *words, "--json"]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return {row["strategy"]: row for row in json.loads(done.stdout)}


def error(row: dict[str, Any]) -> float:
    return max(row["planned"].values()) / max(row["measured"].values()) - 1


def test_the_forecast_is_what_torch_allocates() -> None:
    rows = forecast_and_measured("--strategies", "ddp,fsdp")
    assert all(abs(error(row)) < 0.08 for row in rows.values()), rows
    # DDP rebuilds its buckets once. Where a thread of gloo drops the old ones the profiler does not see it:
    # 1.20 times what is planned; with no buckets in the plan 1.25 or more
    assert rows["ddp"]["measured"]["step"] < 1.22 * rows["ddp"]["planned"]["step"]


@pytest.mark.soak
@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_forecast_is_what_torch_allocates_under_every_strategy(method: str) -> None:
    rows = forecast_and_measured("--method", method)
    assert len(rows) == 9
    assert all(abs(error(row)) < 0.15 for row in rows.values()), rows
