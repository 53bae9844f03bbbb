"""The full matrix on a real pretrained model: every method under every strategy, on one process and on two.

    FINETUNE_SOAK_MODEL=DIR FINETUNE_SOAK_DATA=FILE make soak

DIR is a folder with a small pretrained chat model (SmolLM2-135M-Instruct was used), FILE a jsonl of
`question` and `answer` rows (GSM8K was used).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.distributed.test_parity import FP32, METHODS, SHARDED, assert_same
from tests.front_door import Outcome, in_world

MODEL, DATA = os.environ.get("FINETUNE_SOAK_MODEL"), os.environ.get("FINETUNE_SOAK_DATA")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not (MODEL and DATA), reason="set FINETUNE_SOAK_MODEL and FINETUNE_SOAK_DATA"),
]


def words(method: str, strategy: str, *more: str) -> list[str]:
    return [
        *(f"recipe=smollm2_135m_{method}", f"distributed={strategy}", f"model.name_or_path={MODEL}"),
        f"data.train=[{{path: {DATA}, columns: {{prompt: question, completion: answer}}, limit: 16}}]",
        *("data.max_length=48", "data.too_long=truncate", "data.loss_on=all", "trainer.max_steps=8"),
        *("trainer.per_device_train_batch_size=1", "trainer.global_batch_size=2", *more),
    ]


def launched(cases: dict[str, list[str]], processes: int, at: Path) -> dict[str, Outcome]:
    """Run the cases, and give back the gigabytes of their checkpoints.

    Three a launch: DeepSpeed keeps the weights and states of a finished engine until its process ends.
    """
    outcomes: dict[str, Outcome] = {}
    for names in batched(cases, 3):
        made = in_world({name: cases[name] for name in names}, processes, at)
        for outcome in made.values():
            shutil.rmtree(outcome.path / "checkpoints")
        outcomes |= made
    return outcomes


def batched(cases: dict[str, list[str]], size: int) -> list[list[str]]:
    names = list(cases)
    return [names[start : start + size] for start in range(0, len(names), size)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    outcomes = {}
    for method in METHODS:
        cases = {f"{method}-{s}": words(method, s) for s in ["single", "ddp", *SHARDED]}
        outcomes |= launched(cases, 1, tmp_path_factory.mktemp(f"alone-{method}"))
    bf16 = {"bf16-single": words("lora", "single", "trainer.bf16=true")}
    return outcomes | launched(bf16, 1, tmp_path_factory.mktemp("alone-bf16"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    outcomes = {}
    for method in METHODS:
        cases = {f"{method}-{s}": words(method, s) for s in ["ddp", *SHARDED]}
        outcomes |= launched(cases, 2, tmp_path_factory.mktemp(f"two-{method}"))
    bf16 = {f"bf16-{s}": words("lora", s, "trainer.bf16=true") for s in ["ddp", "fsdp", "zero3"]}
    return outcomes | launched(bf16, 2, tmp_path_factory.mktemp("two-bf16"))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("strategy", ["ddp", *SHARDED])
@pytest.mark.parametrize("processes", [1, 2])
def test_every_strategy_trains_the_real_model_alike(
    processes: int, strategy: str, method: str, alone: dict[str, Outcome], two: dict[str, Outcome]
) -> None:
    outcome = (alone if processes == 1 else two)[f"{method}-{strategy}"]
    tolerance = FP32 if method != "qlora" else 2e-2
    assert_same(outcome, alone[f"{method}-single"], strategy, processes, tolerance)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_bf16_is_the_same_on_the_real_model(
    strategy: str, alone: dict[str, Outcome], two: dict[str, Outcome]
) -> None:
    assert_same(two[f"bf16-{strategy}"], alone["bf16-single"], strategy, 2, 2e-2)


def test_the_real_model_learns(alone: dict[str, Outcome]) -> None:
    for method in METHODS:
        losses = alone[f"{method}-single"].losses
        assert sum(losses[-3:]) < sum(losses[:3])
