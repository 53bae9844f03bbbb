"""The same runs on GPUs; skipped with the reason where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.front_door import finetune

ONE = ["single", "ddp", "fsdp", "fsdp_offload", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"]


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("strategy", ONE)
def test_a_strategy_on_one_gpu(method: str, strategy: str, tmp_path: Path) -> None:
    words = [
        f"recipe=tiny_{method}",
        f"distributed={strategy}",
        "trainer.max_steps=4",
        "launch.num_processes=1",
    ]
    outcome = finetune(*words, at=tmp_path)
    assert outcome.code == 0, outcome.out + outcome.err
    report = outcome.report
    assert report["strategy"] == {"requested": strategy, "actual": strategy}
    assert report["memory"]["measured_bytes"][0]["allocated"] > 0
    assert all(check["passed"] for check in report["verified"])


@pytest.mark.multigpu
@pytest.mark.parametrize("strategy", ONE[1:])
def test_a_strategy_on_two_gpus_trains_as_one_gpu_does(strategy: str, tmp_path: Path) -> None:
    words = ["recipe=tiny_full", "trainer.max_steps=4", "trainer.bf16=false", "trainer.global_batch_size=8"]
    one = finetune(*words, "distributed=single", at=tmp_path, name="one")
    two = finetune(*words, f"distributed={strategy}", "launch.num_processes=2", at=tmp_path, name="two")
    assert two.code == 0, two.out + two.err
    assert two.report["num_processes"] == {"requested": 2, "actual": 2}
    assert two.losses == pytest.approx(one.losses, rel=1e-4)
