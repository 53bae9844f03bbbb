"""Runs that must not end well, and what a good run leaves behind."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.distributed.test_parity import movement_difference, relative_difference
from tests.front_door import REPOSITORY, environment, finetune, in_world
from tests.tiny_models import SIZES

TINY = REPOSITORY / "finetune" / "embedded" / "tiny"
QUICK = ["recipe=tiny_lora", "trainer.max_steps=3", "launch.device=cpu"]


def test_a_loss_that_is_not_finite_ends_the_run_with_the_step_and_the_rows(tmp_path: Path) -> None:
    wild = ["trainer.learning_rate=1e30", "trainer.warmup_steps=0", "trainer.max_grad_norm=0"]
    outcome = finetune("recipe=tiny_full", "trainer.max_steps=5", *wild, "launch.device=cpu", at=tmp_path)
    assert outcome.code == 1
    assert re.search(r"step [23]: the (loss|gradient norm) is (nan|inf) on rank 0", outcome.err)
    assert "Rows of this step on this rank" in outcome.err
    assert "Traceback" not in outcome.err
    assert "set trainer.max_grad_norm." in outcome.err
    assert "fp16" not in outcome.err  # the run is none
    assert f"report    {outcome.path / 'report.html'}\n" in outcome.out
    assert "No known cause" not in (outcome.path / "report.html").read_text(encoding="utf-8")
    assert outcome.report["status"] == "failed"
    assert not (outcome.path / "model").exists()


def test_a_model_that_fails_its_checks_is_not_handed_over(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if any('finetune.training.worker' in word for word in sys.orig_argv):\n"
        "    import finetune.model.export as export\n"
        "    whole = export.get_peft_model_state_dict\n"
        "    def lost(model, **options):\n"
        "        kept = whole(model, **options)\n"
        "        return {name: t * 0 if 'lora_B' in name else t for name, t in kept.items()}\n"
        "    export.get_peft_model_state_dict = lost\n",
        encoding="utf-8",
    )
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    outcome = finetune(*QUICK, at=tmp_path, PYTHONPATH=path)
    assert outcome.code == 1
    assert "did not pass its checks" in outcome.err
    assert outcome.report["status"] == "failed"
    assert not all(check["passed"] for check in outcome.report["verified"])
    assert not (outcome.path / "model").exists()
    assert list((outcome.path / "checkpoints").glob("checkpoint-3/trainer_state.json"))


def test_a_single_row_trains_on_two_processes_and_an_empty_file_is_refused(tmp_path: Path) -> None:
    row = tmp_path / "row.jsonl"
    row.write_text(
        json.dumps({"prompt": "What is 1 plus 1?", "completion": "It is 2."}) + "\n", encoding="utf-8"
    )
    words = [f"data.train={row}", "trainer.per_device_train_batch_size=1", "trainer.global_batch_size=2"]
    outcome = finetune(*QUICK, *words, "launch.num_processes=2", at=tmp_path)
    assert outcome.code == 0, outcome.err
    assert outcome.report["steps"] == 3
    assert outcome.report["num_processes"]["actual"] == 2
    row.write_text("", encoding="utf-8")
    refused = finetune(*QUICK, *words, at=tmp_path, name="refused")
    assert refused.code == 2
    assert str(row) in refused.err
    assert "Traceback" not in refused.err
    assert not (tmp_path / "runs" / "refused" / "model").exists()


def test_packed_streamed_and_plain_rows_teach_the_same(tmp_path: Path) -> None:
    """The same 24 rows in every step, laid out in three ways: loss, gradient and adapter agree."""
    every_row = ["recipe=tiny_lora", "trainer.max_steps=3", "data.train.0.limit=24", "data.max_length=256"]
    every_row += ["trainer.per_device_train_batch_size=24", "trainer.global_batch_size=24"]
    cases = {"plain": [], "packed": ["data.packing=true"], "streamed": ["data.streaming=true"]}
    outcomes = in_world({name: [*every_row, *more] for name, more in cases.items()}, 1, tmp_path)
    plain = outcomes["plain"]
    data = json.loads((outcomes["packed"].path / "data.json").read_text(encoding="utf-8"))["train"]
    assert (data["rows_used"], data["packing_efficiency"] > 0.8) == (24, True)
    assert data["packed_rows"] < 12
    for name in ("packed", "streamed"):
        outcome = outcomes[name]
        assert all(check["passed"] for check in outcome.report["verified"])
        assert relative_difference(outcome.losses, plain.losses) <= 1e-5
        norms = ([step["grad_norm"] for step in o.steps] for o in (outcome, plain))
        assert relative_difference(*norms) <= 1e-4
        assert movement_difference(outcome, plain) <= 1e-3
        assert [step["supervised_tokens"] for step in outcome.steps] == [
            step["supervised_tokens"] for step in plain.steps
        ]


def test_a_run_leaves_what_the_contract_names(tmp_path: Path) -> None:
    switch = "{% if enable_thinking is defined and enable_thinking %}{{ '' }}{% endif %}"
    template = switch + (TINY / "chat_template.jinja").read_text(encoding="utf-8")
    (tmp_path / "own.jinja").write_text(template, encoding="utf-8")
    words = ["seed=7", f"model.chat_template={tmp_path / 'own.jinja'}", "data.thinking=off"]
    outcome = finetune(*QUICK, *words, at=tmp_path)
    assert outcome.code == 0, outcome.err
    saved = (outcome.path / "model" / "chat_template.jinja").read_text(encoding="utf-8")
    assert saved == "{%- set enable_thinking = enable_thinking | default(false) -%}" + template
    for name in (
        "config.yaml",
        "accelerate.yaml",
        "data.json",
        "environment.json",
        "metrics.jsonl",
        "report.json",
    ):
        assert (outcome.path / name).stat().st_size > 0
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "adapter_config.json"):
        assert (outcome.path / "model" / name).exists()
    fields = {"step", "loss", "learning_rate", "grad_norm", "tokens_per_second", "supervised_tokens"}
    assert all(fields <= entry.keys() for entry in outcome.steps)
    report = outcome.report
    assert report["memory"]["measured_bytes"][0]["resident"] > 10_000_000
    assert report["optimizer"] == "torch.AdamW"
    assert report["loss"]["first"] == outcome.losses[0]
    assert len(report["verified"]) == 8


def test_steps_before_an_evaluation_count_in_the_speed_that_is_logged_behind_it(tmp_path: Path) -> None:
    words = ["recipe=tiny_lora", "launch.device=cpu", "trainer.max_steps=10", "trainer.logging_steps=10"]
    words += ["data.eval_fraction=0.1", "trainer.eval_strategy=steps", "trainer.eval_steps=9"]
    outcome = finetune(*words, at=tmp_path)
    assert outcome.code == 0, outcome.err
    (logged,) = outcome.steps
    seconds = logged["tokens"] / logged["tokens_per_second"]
    assert seconds > 10 * logged["rank_seconds"][0], "the steps took as long as their forward passes at least"


def test_evaluation_keeps_no_logits(tmp_path: Path) -> None:
    """Memory does not grow with the rows: the logits of 160 more would take 800 MB here."""
    shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    wide = {**SIZES, "vocab_size": 32_000, "max_position_embeddings": 512}
    Qwen3ForCausalLM(Qwen3Config(**wide)).save_pretrained(tmp_path / "model")
    words = [f"model.name_or_path={tmp_path / 'model'}", "trainer.eval_on_start=true", "data.train.0.limit=4"]
    words += ["recipe=tiny_full", "trainer.max_steps=1", "trainer.per_device_eval_batch_size=1"]
    rows = REPOSITORY / "finetune" / "embedded" / "behaviour.jsonl"
    cases = {f"{n}": [*words, f"data.eval=[{{path: {rows}, limit: {n}}}]"] for n in (84, 244)}
    outcomes = in_world(cases, 1, tmp_path)
    few, many = (outcomes[name].report["memory"]["measured_bytes"][0]["resident"] for name in cases)
    assert outcomes["84"].report["eval_loss"] > 0
    assert many - few < 300_000_000
