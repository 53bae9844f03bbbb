"""conf/, then the recipe, then the command line; and everything that is wrong in one message."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.config.compose import compose, save_config
from finetune.config.schema import Format, LossOn, Method, Strategy, Tracker
from finetune.errors import Problem, Refusal
from finetune.paths import PACKAGE, assets, embedded

CONF = assets() / "conf"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a recipe of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "rows.jsonl").write_text("{}\n")
    write(
        tmp_path,
        "mine",
        """
        defaults:
          - override /model: tiny
          - override /adapter: lora
        adapter: {r: 64}
        data:
          train: [{path: rows.jsonl}]
          eval: [{path: rows.jsonl}]
        trainer: {max_steps: 7, logging_steps: 5}
        """,
    )
    return tmp_path


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / "recipes" / f"{name}.yaml"
    lines = [line[8:] if line.startswith(" " * 8) else line for line in text.splitlines()]
    file.write_text("\n".join(lines))
    return file


def test_recipe_beats_conf_and_the_command_line_beats_the_recipe(folder: Path) -> None:
    composed = compose(["recipe=mine", "trainer.max_steps=3"])
    trainer = composed.config.trainer
    assert (trainer.activation_checkpointing, trainer.logging_steps, trainer.max_steps) == (False, 5, 3)
    assert composed.provenance["trainer.max_steps"] == "command line"
    assert composed.provenance["trainer.logging_steps"] == "recipe mine"
    assert composed.choices["recipe"] == "mine"
    assert composed.choices["model"] == "tiny"


def test_a_group_of_the_command_line_beats_the_recipe(folder: Path) -> None:
    config = compose(["recipe=mine", "adapter=qlora", "distributed=zero3", "tracking=none"]).config
    assert config.adapter.method is Method.qlora
    assert config.adapter.r == 64
    assert config.distributed.strategy is Strategy.zero3


def test_a_group_of_the_command_line_beats_values_that_the_recipe_sets_in_it(folder: Path) -> None:
    write(folder, "fixed", "distributed: {strategy: ddp}\ndata: {train: [{path: rows.jsonl}]}")
    assert compose(["recipe=fixed", "model=tiny"]).config.distributed.strategy is Strategy.ddp
    config = compose(["recipe=fixed", "model=tiny", "distributed=fsdp", "data=alpaca_cleaned"]).config
    assert config.distributed.strategy is Strategy.fsdp
    assert config.data.train[0].format == Format.alpaca


def test_recipes_are_stacked_the_last_one_on_top(folder: Path) -> None:
    write(folder, "more", "defaults: [{override /adapter: full}]\ntrainer: {max_steps: 9}")
    composed = compose(["recipe=[mine,more]"])
    assert composed.config.adapter.method is Method.full
    assert composed.config.trainer.max_steps == 9
    assert composed.choices["recipe"] == "mine+more"


def test_a_recipe_is_found_by_its_path(folder: Path) -> None:
    file = write(folder, "run=1 (a)", "trainer: {max_steps: 2}")
    composed = compose(["model=tiny", "data.train=rows.jsonl", f"recipe={file}"])
    assert composed.config.trainer.max_steps == 2


def test_a_saved_config_repeats_the_run(folder: Path) -> None:
    first = compose(["recipe=mine", "trainer.learning_rate=3e-4", "model.rope_scaling={factor: 2.0}"]).config
    (folder / "run_7").mkdir()
    save_config(first, folder / "run_7" / "config.yaml")
    again = compose(["recipe=run_7/config.yaml"])
    assert again.config == first
    assert again.choices["recipe"] == "run_7"
    changed = compose(["recipe=run_7/config.yaml", "distributed=ddp"]).config
    assert changed == dataclasses.replace(
        first, distributed=dataclasses.replace(first.distributed, strategy=Strategy.ddp)
    )


def test_relative_paths_mean_the_working_directory_and_hub_ids_stay(folder: Path) -> None:
    (folder / "models").mkdir()
    (folder / "models" / "config.json").write_text('{"model_type": "llama"}')
    (folder / "chat.jinja").write_text("{{ messages }}")
    words = ["model.name_or_path=models", "model.chat_template=chat.jinja", "data.eval=yahma/alpaca-cleaned"]
    config = compose(["recipe=mine", *words]).config
    assert config.model.name_or_path == str(folder / "models")
    assert config.model.chat_template == str(folder / "chat.jinja")
    assert config.data.train[0].path == str(folder / "rows.jsonl")
    assert config.data.eval[0].path == "yahma/alpaca-cleaned"
    assert compose(["recipe=mine", "data.train=./not_yet.jsonl"]).config.data.train[0].path == str(
        folder / "not_yet.jsonl"
    )


def test_a_template_given_as_text_stays_as_it_is(folder: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }} ${x}{% endfor %}"
    config = compose(["recipe=mine", "model.chat_template=" + template.replace("${", r"\${")]).config
    assert config.model.chat_template == template
    save_config(config, folder / "config.yaml")
    assert compose(["recipe=config.yaml"]).config.model.chat_template == template


def test_embedded_files_are_found() -> None:
    assert compose(["recipe=tiny_lora"]).config.model.name_or_path == str(embedded("tiny"))


def test_other_training_rows_drop_the_held_out_rows_of_the_recipe_and_say_so(folder: Path) -> None:
    dropped = compose(["recipe=mine", "data.train=[{path: rows.jsonl}]"])
    assert dropped.config.data.eval == []
    assert any("data.eval is dropped" in note for note in dropped.notes)
    kept = compose(["recipe=mine", "data.train=rows.jsonl", "data.eval=rows.jsonl"])
    assert len(kept.config.data.eval) == 1
    assert kept.notes == []
    assert compose(["recipe=mine", "data=alpaca_cleaned"]).config.data.eval == []


def test_unknown_keys_of_recipe_and_command_line_are_told_together(folder: Path) -> None:
    write(folder, "bad", "trainer: {lerning_rate: 1.0e-3, max_stpes: 2}\nmodl: {dtype: float32}")
    with pytest.raises(Refusal) as refusal:
        compose(
            ["recipe=[mine,bad]", "adapter.metod=lora", "data.train=[{path: rows.jsonl, colums: {a: b}}]"]
        )
    text = str(refusal.value)
    assert "5 problems in recipe 'mine+bad'" in text
    for name, close in [
        ("trainer.lerning_rate=0.001 (recipe bad)", "trainer.learning_rate"),
        ("trainer.max_stpes=2 (recipe bad)", "trainer.max_steps"),
        ("modl", "model"),
        ("adapter.metod=lora (command line)", "adapter.method"),
        ("data.train.0.colums", "data.train.columns"),
    ]:
        assert name in text
        assert f"Did you mean {close}?" in text


def test_problems_can_be_kept_for_one_message_with_the_rules(folder: Path) -> None:
    problems: list[Problem] = []
    composed = compose(["recipe=mine", "trainer.lerning_rate=3", "trainer.max_steps=3"], problems=problems)
    assert [p.where for p in problems] == ["trainer.lerning_rate=3 (command line)"]
    assert composed.config.trainer.max_steps == 3


def test_numbers_written_as_text_in_a_recipe_become_numbers(folder: Path) -> None:
    write(folder, "text", "trainer: {learning_rate: '1e-3', warmup_steps: '2', max_steps: '4'}")
    trainer = compose(["recipe=[mine,text]"]).config.trainer
    assert (trainer.learning_rate, trainer.warmup_steps, trainer.max_steps) == (1e-3, 2.0, 4)


def test_a_wrong_type_in_a_recipe_names_the_recipe(folder: Path) -> None:
    write(folder, "wrong", "trainer: {learning_rate: high}\nrun_name: yes")
    with pytest.raises(Refusal, match=r"trainer.learning_rate=high \(recipe wrong\): expected a number"):
        compose(["recipe=[mine,wrong]"])
    with pytest.raises(Refusal, match=r"run_name=true \(recipe wrong\)(.|\n)*in quotes"):
        compose(["recipe=[mine,wrong]"])


def test_everything_that_is_missing_is_told_at_once() -> None:
    with pytest.raises(Refusal, match=r"(?s)model\.name_or_path is missing.*data\.train is missing"):
        compose([])
    with pytest.raises(Refusal, match=r"data\.train\[0\]\.path is missing"):
        compose(["model=tiny", "data.train=[{limit: 3}]"])


def test_interpolations_that_lead_nowhere_are_told_together() -> None:
    words = [
        "run_name=${nothing}",
        "trainer.optim=${broken",
        "data.train=[{path: ${embedded:x}, name: '${no.where}'}]",
    ]
    with pytest.raises(Refusal) as refusal:
        compose(["model=tiny", *words])
    text = str(refusal.value)
    assert "3 problems" in text
    for key in ("run_name", "optim", "data.train[0].name"):
        assert key in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_length=8", "data.max_length"),
        ("trainer.seed=1", "use seed"),
        ("trainer.output_dir=x", "use output_dir"),
        ("trainer.packing=true", "data.packing"),
        ("trainer.assistant_only_loss=true", "data.loss_on"),
        ("trainer.save_steps=10", "checkpoint.every_steps"),
        ("trainer.report_to=wandb", "tracking=NAME"),
        ("trainer.fsdp=full_shard", "distributed=NAME"),
        ("trainer.deepspeed={stage: 3}", "distributed=NAME"),
        ("trainer.use_cpu=true", "launch.device=cpu"),
        ("trainer.push_to_hub=true", "hf upload"),
        ("trainer.model_init_kwargs={device_map: auto}", "keys of model"),
        ("trainer.train_sampling_strategy=sequential", "order of the rows"),
        ("model.device_map=auto", "(?s)splits one model.*distributed=fsdp"),
        ("lr=1", "Did you mean trainer.learning_rate"),
        ("distributed=zero5", r"(?s)no such choice.*Did you mean distributed=zero3"),
        ("model=qwen9b", r"model\.name_or_path=qwen9b"),
        ("recipe=tiny_lroa", r"Did you mean recipe=tiny_lora\?"),
        ("recipe=nowhere/x.yaml", "there is no file"),
    ],
)
def test_a_key_that_belongs_elsewhere_or_comes_later_says_so(override: str, message: str) -> None:
    with pytest.raises(Refusal, match=message):
        compose(["recipe=tiny_lora", override])


@pytest.mark.parametrize(
    "override",
    [
        "trainer.hub_token=abc",
        "model.token=secretsecret",
        "run_name=hf_abcdefghijklmnopqrst",
        "data.train=[{path: hf_abcdefghijklmnopqrst}]",
        "data.train=[{path: x, token: abc}]",
        "nonsense.key=hf_abcdefghijklmnopqrst",
        "hf_abcdefghijklmnopqrst",
        "data.train=[{hf_abcdefghijklmnopqrst",
    ],
)
def test_a_token_is_refused_and_never_repeated(override: str) -> None:
    with pytest.raises(Refusal) as refusal:
        compose(["recipe=tiny_lora", override])
    assert "hf_abcdefghijklmnopqrst" not in str(refusal.value)
    assert "secretsecret" not in str(refusal.value)


def test_special_tokens_are_no_secrets(folder: Path) -> None:
    composed = compose(["recipe=mine", "trainer.include_num_input_tokens_seen=all"])
    assert composed.config.trainer.include_num_input_tokens_seen == "all"


def test_the_old_name_of_recomputation_is_accepted_and_said_to_be_old(folder: Path) -> None:
    composed = compose(["recipe=mine", "trainer.gradient_checkpointing=true"])
    assert composed.config.trainer.activation_checkpointing is True
    assert composed.notes == [
        "trainer.gradient_checkpointing is the old name of trainer.activation_checkpointing (command line)"
    ]
    with pytest.raises(Refusal, match="says otherwise"):
        compose(
            ["recipe=mine", "trainer.gradient_checkpointing=true", "trainer.activation_checkpointing=false"]
        )


def test_a_recipe_that_is_no_yaml_is_named(folder: Path) -> None:
    write(folder, "broken", "trainer: [1")
    with pytest.raises(Refusal, match=r"broken\.yaml is not readable as YAML"):
        compose(["recipe=broken"])


def test_the_config_holds_plain_objects_only(folder: Path) -> None:
    config = compose(
        ["recipe=mine", "adapter.target_modules=[q_proj]", "model.rope_scaling={factor: 2.0}"]
    ).config
    text = json.dumps(dataclasses.asdict(config))
    assert json.loads(text)["adapter"]["target_modules"] == ["q_proj"]
    assert type(config.adapter.target_modules) is list
    assert type(config.model.rope_scaling) is dict
    assert config.data.loss_on is LossOn.assistant


def test_composing_imports_no_heavy_library_and_reading_a_saved_config_no_hydra(folder: Path) -> None:
    save_config(compose(["recipe=mine"]).config, folder / "config.yaml")
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    compose_it = "from finetune.config.compose import compose; compose(['recipe=mine'])"
    read_it = "from finetune.config.saved import load_config; load_config(pathlib.Path('config.yaml'))"
    for code, heavy in [(compose_it, "torch transformers trl datasets"), (read_it, "torch hydra")]:
        code = f"import pathlib, sys; {code}; print([m for m in '{heavy}'.split() if m in sys.modules])"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("file", sorted((CONF / "distributed").glob("*.yaml")), ids=lambda f: f.stem)
def test_a_strategy_file_says_what_it_is_when_to_use_it_and_what_it_costs(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert len([line for line in lines if line.startswith("#")]) >= 3
    config = compose(["recipe=tiny_lora", f"distributed={file.stem}"]).config
    assert config.distributed.strategy.value == file.stem


def test_every_strategy_tracker_and_method_has_its_file() -> None:
    def names(group: str) -> set[str]:
        return {file.stem for file in (CONF / group).glob("*.yaml")}

    assert names("distributed") == {s.value for s in Strategy}
    assert names("tracking") == {t.value for t in Tracker}
    assert names("adapter") == {m.value for m in Method}


@pytest.mark.parametrize("name", [t.value for t in Tracker])
def test_a_tracker_is_chosen_by_its_group(name: str) -> None:
    config = compose(["recipe=tiny_lora", f"tracking={name}"]).config
    assert config.tracking.report_to.value == name


def test_defaults_of_trl_that_are_not_kept_are_set_in_conf() -> None:
    trainer = compose(["model=tiny", "data.train=x"]).config.trainer
    assert trainer.activation_checkpointing is False
    assert trainer.logging_steps == 1
    assert trainer.bf16 is None
