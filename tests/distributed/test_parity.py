"""Every strategy trains the same: the same seed and global batch give the same losses and the same saved
model.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.front_door import Outcome, finetune, in_world, relative_difference

SHARDED = ["fsdp", "fsdp_offload", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"]
METHODS = ["full", "lora", "qlora"]
CLASSES = {
    "single": "ForCausalLM",
    "ddp": "DistributedDataParallel",
    "fsdp": "FSDP",
    "zero": "DeepSpeedEngine",
}
STEPS = 8
WORDS = [f"trainer.max_steps={STEPS}", "trainer.per_device_train_batch_size=2", "trainer.global_batch_size=8"]
# 1e-5 is the promise; the movement of the weights amplifies the order of float32 sums
FP32 = 1e-5


def words(method: str, strategy: str, *more: str) -> list[str]:
    return [f"recipe=tiny_{method}", f"distributed={strategy}", *WORDS, *more]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """The reference: one process, no strategy, and every sharding of that one process beside it."""
    cases = {f"{m}-{s}": words(m, s) for m in METHODS for s in ["single", "ddp", *SHARDED]}
    cases |= {f"bf16-{s}": words("lora", s, "trainer.bf16=true") for s in ["single", "fsdp", "zero3"]}
    return in_world(cases, 1, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """The same cases on two processes, in one launch."""
    cases = {f"{m}-{s}": words(m, s) for m in ["lora", "qlora"] for s in ["ddp", *SHARDED]}
    cases["full-fsdp-unresharded"] = words("full", "fsdp", "distributed.reshard_after_forward=false")
    cases |= {f"bf16-{s}": words("lora", s, "trainer.bf16=true") for s in ["ddp", "fsdp", "zero2", "zero3"]}
    return in_world(cases, 2, tmp_path_factory.mktemp("two"))


def assert_same(
    outcome: Outcome, reference: Outcome, strategy: str, processes: int, tolerance: float
) -> None:
    report = outcome.report
    assert report["num_processes"] == {"requested": processes, "actual": processes}
    assert report["strategy"] == {"requested": strategy, "actual": strategy}
    assert CLASSES[strategy.rstrip("123").split("_")[0].rstrip("123")] in report["wrapped_by"]
    assert report["status"] == "completed"
    assert all(check["passed"] for check in report["verified"])
    assert len(outcome.losses) == STEPS
    assert relative_difference(outcome.losses, reference.losses) <= tolerance
    assert movement_difference(outcome, reference) <= max(tolerance, 1e-3) * 10


def movement_difference(outcome: Outcome, reference: Outcome) -> float:
    """Relative distance of two saved models or adapters."""
    ours, theirs = (load_file(next((o.path / "model").glob("*.safetensors"))) for o in (outcome, reference))
    assert ours.keys() == theirs.keys()
    assert {t.dtype for t in ours.values()} == {t.dtype for t in theirs.values()}
    apart = sum(torch.sum((ours[n].double() - theirs[n].double()) ** 2) for n in ours)
    size = sum(torch.sum(t.double() ** 2) for t in theirs.values())
    return float((apart / size).sqrt())


@pytest.mark.parametrize("strategy", ["ddp", *SHARDED])
def test_a_strategy_on_two_processes_trains_as_one_process_does(
    strategy: str, alone: dict[str, Outcome], tmp_path: Path
) -> None:
    outcome = finetune(*words("full", strategy), "launch.num_processes=2", "launch.device=cpu", at=tmp_path)
    assert outcome.code == 0, outcome.out + outcome.err
    assert_same(outcome, alone["full-single"], strategy, 2, FP32)
    assert "global batch 8 = 2 per device x 2 processes x 2 accumulation" in outcome.out
    assert (outcome.path / "logs" / "rank-1.log").exists()


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("strategy", ["ddp", *SHARDED])
def test_adapters_train_alike_on_two_processes(
    method: str, strategy: str, alone: dict[str, Outcome], two: dict[str, Outcome]
) -> None:
    tolerance = FP32 if method == "lora" else 2e-2
    assert_same(two[f"{method}-{strategy}"], alone[f"{method}-single"], strategy, 2, tolerance)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("strategy", ["ddp", *SHARDED])
def test_a_strategy_on_one_process_trains_as_none(
    method: str, strategy: str, alone: dict[str, Outcome]
) -> None:
    tolerance = FP32 if method != "qlora" else 2e-2
    assert_same(alone[f"{method}-{strategy}"], alone[f"{method}-single"], strategy, 1, tolerance)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "zero3"])
def test_bf16_means_the_same_under_every_strategy(
    strategy: str, alone: dict[str, Outcome], two: dict[str, Outcome]
) -> None:
    outcome = two[f"bf16-{strategy}"]
    assert outcome.report["precision"] == "bf16"
    assert_same(outcome, alone["bf16-single"], strategy, 2, 2e-2)


def test_weights_that_stay_gathered_change_nothing(
    alone: dict[str, Outcome], two: dict[str, Outcome]
) -> None:
    outcome = two["full-fsdp-unresharded"]
    assert "weights stay gathered after forward" in outcome.out
    assert_same(outcome, alone["full-single"], "fsdp", 2, FP32)
