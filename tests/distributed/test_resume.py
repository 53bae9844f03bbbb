"""A resumed run equals the one that was never interrupted: bit for bit in fp32 on the CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finetune.model.state import SavedState
from tests.distributed.test_parity import METHODS, SHARDED
from tests.front_door import REPOSITORY, Outcome, finetune, in_world, relative_difference

STEPS = 7
AT = {"plain": 3, "packed": 3, "streamed": 4, "mixed": 5}
"""7 steps of 8 rows are more than one epoch of 27 rows (plain, mixed): step 3 lies inside the first one, step
5 inside the second.
"""

STRATEGIES = ["single", "ddp", *SHARDED]
EMBEDDED = REPOSITORY / "finetune" / "embedded"
KINDS = {
    "plain": ["data.train.0.limit=27"],
    "packed": ["data.train.0.limit=60", "data.packing=true", "data.max_length=128"],
    "streamed": ["data.streaming=true"],
    "mixed": [
        f"data.train=[{{path: {EMBEDDED}/behaviour.jsonl, weight: 2, limit: 18}}, "
        f"{{path: {EMBEDDED}/behaviour_eval.jsonl, weight: 1}}]"
    ],
}


def words(method: str, strategy: str, kind: str = "plain", *more: str) -> list[str]:
    dropout = [] if method == "full" else ["adapter.lora_dropout=0.1"]
    return [
        *(f"recipe=tiny_{method}", f"distributed={strategy}", f"trainer.max_steps={STEPS}"),
        *("trainer.per_device_train_batch_size=2", "trainer.global_batch_size=8"),
        *("checkpoint.every_steps=1", "checkpoint.keep=20", *KINDS[kind], *dropout, *more),
    ]


def resumed(
    straight: dict[str, Outcome], cases: dict[str, list[str]], processes: int, at: Path
) -> dict[str, Outcome]:
    """Each case (its name ends with the kind of data) gone on with in a folder as a crash leaves it."""
    for name in cases:
        interrupted(straight[name], at / "runs" / f"{name}-resumed", AT[name.split("-")[-1]])
    again = {f"{name}-resumed": [*case, "checkpoint.resume=auto"] for name, case in cases.items()}
    outcomes = in_world(again, processes, at)
    return {name: outcomes[f"{name}-resumed"] for name in cases}


def interrupted(straight: Outcome, folder: Path, at: int = AT["plain"]) -> None:
    shutil.copytree(straight.path, folder, ignore=shutil.ignore_patterns("model", "report.json"))
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name.split("-")[1]) > at:
            shutil.rmtree(checkpoint)


def assert_the_same_run(ours: Outcome, straight: Outcome, strategy: str) -> None:
    assert ours.report["num_processes"]["actual"] == (1 if strategy == "single" else 2)
    assert ours.report["strategy"]["actual"] == strategy
    assert [step["step"] for step in ours.steps] == list(range(1, STEPS + 1))
    for key in ("loss", "learning_rate", "grad_norm", "supervised_tokens", "tokens"):
        assert [step[key] for step in ours.steps] == [step[key] for step in straight.steps], key
    models = [load_file(next((o.path / "model").glob("*.safetensors"))) for o in (ours, straight)]
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[1])
    assert all(check["passed"] for check in ours.report["verified"])


PAIRWISE = {
    f"{strategy}-{kind}": (METHODS[(row + column) % 3], strategy, kind)
    for row, strategy in enumerate(STRATEGIES)
    for column, kind in enumerate(["packed", "streamed", "mixed"])
    if kind != "streamed" or strategy in ("single", "ddp")
}
"""Every strategy with packed and with mixed data, every method with every kind; `make soak` has them all."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Outcome, Outcome]]:
    """Each case straight, and gone on with."""
    found = {}
    for processes in (1, 2):
        at = tmp_path_factory.mktemp("resume")
        cases = {
            name: words(*case) for name, case in PAIRWISE.items() if (case[1] == "single") == (processes == 1)
        }
        straight = in_world(cases, processes, at)
        again = resumed(straight, cases, processes, at)
        found |= {name: (again[name], straight[name]) for name in cases}
    return found


@pytest.mark.parametrize("name", PAIRWISE)
def test_a_resumed_run_equals_an_uninterrupted_one(
    name: str, pairs: dict[str, tuple[Outcome, Outcome]]
) -> None:
    assert_the_same_run(*pairs[name], strategy=PAIRWISE[name][1])


def test_a_checkpoint_holds_no_base_weights_and_no_arguments(
    pairs: dict[str, tuple[Outcome, Outcome]],
) -> None:
    for name, (_, straight) in pairs.items():
        folder = straight.path / "checkpoints" / f"checkpoint-{STEPS}"
        files = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["files"]
        assert not list(folder.rglob("training_args.bin"))
        adapter = straight.path / "model" / "adapter_model.safetensors"
        if adapter.exists():
            trained = sum(tensor.numel() * 4 for tensor in load_file(adapter).values())
            size = sum(entry["bytes"] for entry in files.values())
            assert size < 4 * trained, name  # adapter, two moments, and the names


def test_a_checkpoint_of_shards_is_merged_into_what_the_run_hands_over(
    pairs: dict[str, tuple[Outcome, Outcome]], tmp_path: Path
) -> None:
    full = pairs["zero3-mixed"][0]
    assert full.report["wrapped_by"] == "DeepSpeedEngine"
    merged = finetune("merge", checkpoint(full), "--to", str(tmp_path / "full"), "--json", at=tmp_path)
    assert merged.code == 0, merged.err
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path / "full", full.path / "model"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    adapter = pairs["fsdp-packed"][0]  # trained on a base of four bits
    both = {"shards": checkpoint(adapter), "model": str(adapter.path)}
    for name, source in both.items():
        done = finetune("merge", source, "--to", str(tmp_path / name), "--json", at=tmp_path)
        assert done.code == 0, done.err
        assert json.loads(done.out)["verified"] is True
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in both)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    words = [(tmp_path / name / "tokenizer.json").read_bytes() for name in both]
    assert words[0] == words[1]
    (Path(checkpoint(full)) / "state" / "rank-00001-000.safetensors").unlink()
    damaged = finetune("merge", checkpoint(full), "--to", str(tmp_path / "no"), at=tmp_path)
    assert damaged.code == 2
    assert "rank-00001-000.safetensors is missing" in damaged.err


def checkpoint(outcome: Outcome) -> str:
    return str(outcome.path / "checkpoints" / f"checkpoint-{STEPS}")


TWO_TO_ONE = {
    "plain-2-1": ("lora", "ddp", "single"),
    "fsdp-2-1": ("full", "fsdp", "fsdp"),
    "zero2-2-1": ("full", "zero2", "zero2"),
    "zero3-2-1": ("full", "zero3", "zero3"),
}
ONE_TO_TWO = {
    "plain-1-2": ("lora", "single", "ddp"),
    "fsdp-1-2": ("full", "fsdp", "fsdp"),
    "zero2-1-2": ("full", "zero2", "zero2"),
    "zero3-1-2": ("full", "zero3", "zero3"),
}
ACROSS = {
    "ddp-zero3": ("full", "ddp", "zero3"),
    "fsdp-ddp": ("full", "fsdp", "ddp"),
    "zero3-fsdp": ("lora", "zero3", "fsdp"),
    "zero1-ddp": ("qlora", "zero1", "ddp"),
    "ddp-zero2": ("lora", "ddp", "zero2"),
}
ELASTIC = {**TWO_TO_ONE, **ONE_TO_TWO, **ACROSS}


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Outcome, Outcome]]:
    """Straight runs, and runs gone on with by another number of processes or strategy, in three launches."""
    at = tmp_path_factory.mktemp("elastic")
    before = {name: no_dropout(method, first) for name, (method, first, _) in ELASTIC.items()}
    after = {
        name: [*no_dropout(method, last), "checkpoint.resume=auto"]
        for name, (method, _, last) in ELASTIC.items()
    }
    straight = in_world({name: before[name] for name in {**TWO_TO_ONE, **ACROSS}}, 2, at)
    for name in straight:
        interrupted(straight[name], at / "runs" / f"{name}-resumed")
    alone = {name: before[name] for name in ONE_TO_TWO}
    outcomes = in_world(alone | {f"{name}-resumed": after[name] for name in TWO_TO_ONE}, 1, at)
    for name in ONE_TO_TWO:
        interrupted(outcomes[name], at / "runs" / f"{name}-resumed")
    outcomes |= straight
    outcomes |= in_world({f"{name}-resumed": after[name] for name in {**ONE_TO_TWO, **ACROSS}}, 2, at)
    return {name: (outcomes[f"{name}-resumed"], outcomes[name]) for name in ELASTIC}


def no_dropout(method: str, strategy: str) -> list[str]:
    return [word for word in words(method, strategy) if not word.startswith("adapter.lora_dropout")]


@pytest.mark.parametrize("name", ELASTIC)
def test_another_number_of_processes_or_strategy_goes_on_alike(
    name: str, elastic: dict[str, tuple[Outcome, Outcome]]
) -> None:
    ours, straight = elastic[name]
    _, first, last = ELASTIC[name]
    assert straight.report["num_processes"]["actual"] == (1 if name in ONE_TO_TWO else 2)
    assert ours.report["num_processes"]["actual"] == (1 if name in TWO_TO_ONE else 2)
    assert (straight.report["strategy"]["actual"], ours.report["strategy"]["actual"]) == (first, last)
    assert [step["step"] for step in ours.steps] == list(range(1, STEPS + 1))
    assert relative_difference(ours.losses, straight.losses) <= 1e-5
    norms = ([step["grad_norm"] for step in outcome.steps] for outcome in (ours, straight))
    assert relative_difference(*norms) <= 1e-4
    states = [
        SavedState(outcome.path / "checkpoints" / f"checkpoint-{STEPS}") for outcome in (ours, straight)
    ]
    assert states[0].shapes == states[1].shapes
    assert {key.partition("/")[0] for key in states[0].shapes} >= {"weight", "exp_avg", "exp_avg_sq"}
    for key in states[0].shapes:
        a, b = (state.whole(*key.split("/")).double() for state in states)
        assert (a - b).norm() <= 2e-3 * b.norm() + 1e-12, key
