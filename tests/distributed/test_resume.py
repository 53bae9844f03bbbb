"""A resumed run equals the one that was never interrupted: bit for bit in fp32 on the CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_parity import movement_difference
from tests.front_door import Outcome, in_world, relative_difference

STEPS, AT = 7, 3
STRATEGIES = ["ddp", "fsdp", "fsdp_offload", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"]
"""7 steps of 8 rows are more than one epoch of 27 rows; step 3 lies inside the first, step 4 ends it."""


def words(method: str, strategy: str, *more: str) -> list[str]:
    return [
        *(f"recipe=tiny_{method}", f"distributed={strategy}", f"trainer.max_steps={STEPS}"),
        *("data.train.0.limit=27", "trainer.per_device_train_batch_size=2", "trainer.global_batch_size=8"),
        *("checkpoint.every_steps=1", "checkpoint.keep=20", *more),
    ]


CASES = {
    **{f"lora-{strategy}": words("lora", strategy, "adapter.lora_dropout=0.1") for strategy in STRATEGIES},
    "full-ddp": words("full", "ddp"),
    "full-fsdp": words("full", "fsdp"),
    "full-zero2": words("full", "zero2"),
    "full-zero3": words("full", "zero3"),
    "packed-ddp": words("lora", "ddp", "data.packing=true", "data.max_length=128"),
    "qlora-fsdp": words("qlora", "fsdp"),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Outcome, Outcome]]:
    """Each case straight, and gone on with from step 3 in a folder as a crash would have left it."""
    at = tmp_path_factory.mktemp("resume")
    return resumed_from(in_world(CASES, 2, at), CASES, 2, at)


def resumed_from(
    straight: dict[str, Outcome], cases: dict[str, list[str]], processes: int, at: Path
) -> dict[str, tuple[Outcome, Outcome]]:
    for name in cases:
        interrupted = at / "runs" / f"{name}-resumed"
        shutil.copytree(
            straight[name].path, interrupted, ignore=shutil.ignore_patterns("model", "report.json")
        )
        for folder in (interrupted / "checkpoints").iterdir():
            if int(folder.name.split("-")[1]) > AT:
                shutil.rmtree(folder)
    again = {f"{name}-resumed": [*case, "checkpoint.resume=auto"] for name, case in cases.items()}
    resumed = in_world(again, processes, at)
    return {name: (straight[name], resumed[f"{name}-resumed"]) for name in cases}


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_equals_an_uninterrupted_one(
    name: str, pairs: dict[str, tuple[Outcome, Outcome]]
) -> None:
    straight, resumed = pairs[name]
    assert resumed.report["num_processes"]["actual"] == 2
    assert resumed.report["strategy"]["actual"] == name.split("-")[1]
    assert [step["step"] for step in resumed.steps] == list(range(1, STEPS + 1))
    for key in ("loss", "learning_rate", "grad_norm", "supervised_tokens", "tokens"):
        assert [step[key] for step in resumed.steps] == [step[key] for step in straight.steps], key
    ours, theirs = (load_file(next((o.path / "model").glob("*.safetensors"))) for o in (resumed, straight))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert all(check["passed"] for check in resumed.report["verified"])


def test_a_checkpoint_holds_no_base_weights_and_no_arguments(
    pairs: dict[str, tuple[Outcome, Outcome]],
) -> None:
    for name, (straight, _) in pairs.items():
        folder = straight.path / "checkpoints" / f"checkpoint-{STEPS}"
        files = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["files"]
        assert not list(folder.rglob("training_args.bin"))
        adapter = straight.path / "model" / "adapter_model.safetensors"
        if adapter.exists():
            trained = sum(tensor.numel() * 4 for tensor in load_file(adapter).values())
            words = sum(entry["bytes"] for file, entry in files.items() if "token" in file)
            size = sum(entry["bytes"] for entry in files.values()) - words
            assert size < 4 * trained + 3 * trained, name  # adapter; its masters and two moments


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_processes_goes_on_alike(
    before: int, after: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    at = tmp_path_factory.mktemp("elastic")
    plain = {1: "single", 2: "ddp"}
    methods = {"plain": "lora", "fsdp": "full"}

    def cases(processes: int) -> dict[str, list[str]]:
        strategies = {"plain": plain[processes], "fsdp": "fsdp"}
        return {name: words(method, strategies[name]) for name, method in methods.items()}

    outcomes = resumed_from(in_world(cases(before), before, at), cases(after), after, at)
    for name, (straight, resumed) in outcomes.items():
        assert straight.report["num_processes"]["actual"] == before
        assert resumed.report["num_processes"]["actual"] == after
        assert resumed.report["strategy"]["actual"] == (plain[after] if name == "plain" else "fsdp")
        assert len(resumed.losses) == STEPS
        assert relative_difference(resumed.losses, straight.losses) <= 1e-5
        norms = ([step["grad_norm"] for step in outcome.steps] for outcome in (resumed, straight))
        assert relative_difference(*norms) <= 1e-4
        assert movement_difference(resumed, straight) <= 1e-3
