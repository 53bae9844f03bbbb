"""Every strategy trains the same: the same seed and global batch give the same losses and the same saved
model.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finetune.paths import embedded
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
FP32 = 1e-5
SEVEN = [
    f"data.train=[{{path: {embedded('behaviour.jsonl')}, limit: 7}}]",
    "trainer.global_batch_size=4",
]
EVALUATED = ["data.eval_fraction=0.1", "trainer.eval_strategy=steps", "trainer.eval_steps=4"]


def words(method: str, strategy: str, *more: str) -> list[str]:
    return [f"recipe=tiny_{method}", f"distributed={strategy}", *WORDS, *more]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """The reference: one process, no strategy, and every sharding of that one process beside it."""
    cases = {f"{m}-{s}": words(m, s) for m in METHODS for s in ["single", "ddp", *SHARDED]}
    cases["bf16-single"] = words("lora", "single", "trainer.bf16=true")
    cases["pure-bf16"] = words("full", "single", "model.dtype=bfloat16", "trainer.optim=adamw_bnb_8bit")
    cases["split-8x1"] = words("full", "single", "trainer.per_device_train_batch_size=8")
    cases["split-1x8"] = words("full", "single", "trainer.per_device_train_batch_size=1")
    cases["seven"] = words("full", "single", *SEVEN)
    cases["evaluated"] = words("lora", "single", *EVALUATED, "trainer.per_device_eval_batch_size=4")
    return in_world(cases, 1, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """The same cases on two processes, in one launch."""
    cases = {f"{m}-{s}": words(m, s) for m in ["lora", "qlora"] for s in ["ddp", *SHARDED]}
    cases["full-fsdp-unresharded"] = words("full", "fsdp", "distributed.reshard_after_forward=false")
    cases |= {f"bf16-{s}": words("lora", s, "trainer.bf16=true") for s in ["ddp", "fsdp", "zero2", "zero3"]}
    cases |= {f"seven-{s}": words("full", s, *SEVEN) for s in ["ddp", "fsdp", "zero3"]}
    cases["recomputed"] = words("lora", "ddp", "trainer.activation_checkpointing=true")
    cases["evaluated"] = words("lora", "fsdp", *EVALUATED)
    cases["bf16-weights"] = words("full", "fsdp", "model.dtype=bfloat16")
    cases["heads"] = words("lora", "zero3", "adapter.modules_to_save=[embed_tokens,lm_head]")
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


def test_weights_held_in_bfloat16_stay_so_and_others_are_float32(
    alone: dict[str, Outcome], two: dict[str, Outcome]
) -> None:
    for outcome in (alone["pure-bf16"], two["bf16-weights"]):
        assert outcome.report["master_dtype"] == "bfloat16"
        assert outcome.report["precision"] == "bf16"
        assert all(check["passed"] for check in outcome.report["verified"])
    assert alone["pure-bf16"].report["optimizer"].startswith("bitsandbytes.")
    assert two["bf16-zero3"].report["master_dtype"] == "float32"
    assert alone["full-single"].report["master_dtype"] == "float32"


def test_a_trained_head_tied_to_the_embedding_is_saved_and_reopened(two: dict[str, Outcome]) -> None:
    outcome = two["heads"]
    assert all(check["passed"] for check in outcome.report["verified"])
    names = load_file(outcome.path / "model" / "adapter_model.safetensors")
    assert any("lm_head" in name for name in names)
    assert any("embed_tokens" in name for name in names)


def test_weights_that_stay_gathered_change_nothing(
    alone: dict[str, Outcome], two: dict[str, Outcome]
) -> None:
    outcome = two["full-fsdp-unresharded"]
    assert "weights stay gathered after forward" in outcome.out
    assert_same(outcome, alone["full-single"], "fsdp", 2, FP32)


@pytest.mark.parametrize("split", ["split-8x1", "split-1x8"])
def test_the_split_of_a_batch_does_not_change_the_run(split: str, alone: dict[str, Outcome]) -> None:
    assert_same(alone[split], alone["full-single"], "single", 1, FP32)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_an_epoch_that_does_not_fill_its_last_batch_is_the_same_on_two_processes(
    strategy: str, alone: dict[str, Outcome], two: dict[str, Outcome]
) -> None:
    outcome = two[f"seven-{strategy}"]
    assert "the last one filled up with 1 empty row" in outcome.out
    assert_same(outcome, alone["seven"], strategy, 2, FP32)
    counted = [entry["supervised_tokens"] for entry in outcome.steps]
    assert counted == [entry["supervised_tokens"] for entry in alone["seven"].steps]
    assert counted[3] == 2 * counted[1]  # two epochs of the same seven rows, none repeated


def test_recomputation_changes_nothing(alone: dict[str, Outcome], two: dict[str, Outcome]) -> None:
    assert_same(two["recomputed"], alone["lora-single"], "ddp", 2, FP32)


def test_the_evaluation_loss_depends_on_neither_batch_nor_processes(
    alone: dict[str, Outcome], two: dict[str, Outcome]
) -> None:
    one, other = alone["evaluated"].report, two["evaluated"].report
    assert one["eval_loss"] == pytest.approx(other["eval_loss"], rel=FP32)
    assert one["loss"]["last"] == pytest.approx(other["loss"]["last"], rel=FP32)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "zero3"])
def test_a_checkpoint_of_an_adapter_holds_no_base_weights(strategy: str, two: dict[str, Outcome]) -> None:
    run = two[f"lora-{strategy}"].path
    (checkpoint,) = (run / "checkpoints").iterdir()
    adapter = (run / "model" / "adapter_model.safetensors").stat().st_size
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if "tokenizer" not in file.name)
    # adapter, its two optimizer moments, and (DeepSpeed) a float32 master copy
    assert size < 1.5 * (adapter + 3 * adapter) + 300_000
    assert adapter > 500_000


def test_a_saved_model_answers_like_every_other(alone: dict[str, Outcome], two: dict[str, Outcome]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded("tiny"))
    chat = [{"role": "user", "content": "What is the opposite of big?"}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answers = set()
    for run in [alone["lora-single"], *(two[f"lora-{s}"] for s in ["ddp", *SHARDED])]:
        base = AutoModelForCausalLM.from_pretrained(embedded("tiny"))
        model = PeftModel.from_pretrained(base, run.path / "model")
        answers.add(tuple(model.generate(**prompt, max_new_tokens=16, do_sample=False)[0].tolist()))
    assert len(answers) == 1
