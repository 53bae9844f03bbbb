"""Every recipe composes, suits every strategy, and says what it is, where it ran and who says so."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.config.compose import compose
from finetune.config.devices import Devices
from finetune.config.rules import RunFacts, resolve
from finetune.config.schema import DistributedConfig, ModelConfig, RunConfig, ShapeConfig, Strategy
from finetune.distributed.accelerate import launch_file

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
MODELS = sorted(path.stem for path in (ROOT / "conf" / "model").glob("*.yaml"))
SEVERAL = [s for s in Strategy if s not in (Strategy.auto, Strategy.single)]
ALONE = {"tiny_pretrain"}
"""Made for one process: its result is committed, and its global batch is one process's."""
SPREAD = [name for name in RECIPES if name not in ALONE]
ONE_GPU = Devices(gpus=1, gpu_names=("NVIDIA H100",), bf16=True, driver_gpus=1, cpu_cores=16)
EIGHT_GPUS = Devices(gpus=8, gpu_names=("NVIDIA H100",) * 8, bf16=True, driver_gpus=8, cpu_cores=96)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_composes_and_runs_on_one_gpu(name: str) -> None:
    config = _composed(name)
    facts = resolve(config, devices=ONE_GPU)
    assert (facts.strategy, facts.num_processes) == (Strategy.single, 1)
    assert facts.batch.global_size == config.trainer.global_batch_size


@pytest.mark.parametrize("name", SPREAD)
def test_recipe_keeps_its_global_batch_on_eight_gpus(name: str) -> None:
    config = _composed(name)
    facts = resolve(config, devices=EIGHT_GPUS)
    assert (facts.strategy, facts.num_processes) == (Strategy.ddp, 8)
    assert facts.batch.global_size == config.trainer.global_batch_size


@pytest.mark.parametrize("strategy", SEVERAL, ids=lambda s: s.value)
@pytest.mark.parametrize("name", SPREAD)
def test_recipe_validates_and_renders_under_the_strategy(name: str, strategy: Strategy) -> None:
    config = replace(_composed(name), distributed=_distributed(strategy))
    for gpus in (2, 4, 8):
        facts = _on(config, gpus)
        assert (facts.strategy, facts.num_processes) == (strategy, gpus)
        assert launch_file(facts, config.launch, config.distributed)["num_processes"] == gpus


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_leaves_how_the_run_is_spread_to_the_person(name: str) -> None:
    chosen = {key.removeprefix("override /") for entry in _recipe(name)["defaults"] for key in entry}
    assert {"model", "adapter"} <= chosen
    assert not ({"distributed", "launch"} & (chosen | set(_recipe(name))))


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_named_after_its_model_and_method(name: str) -> None:
    config = _composed(name)
    model = _model_of(name)
    method = name.removeprefix(f"{model}_")
    assert name == f"{model}_{method}"
    assert method in (config.adapter.method.value, "pretrain")


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_header_tells_purpose_hardware_command_and_where_the_settings_are_from(name: str) -> None:
    header = _header(ROOT / "recipes" / f"{name}.yaml")
    assert header[0] == "# @package _global_"
    assert re.match(r"# \S.*\.$", header[1])
    for field in ("# Hardware: ", "# Settings: "):
        assert sum(line.startswith(field) for line in header) == 1
    command = next(line for line in header if line.startswith("# Run: "))
    assert command.endswith(f"python -m finetune recipe={name}")


@pytest.mark.parametrize("name", RECIPES)
def test_numbers_of_a_recipe_are_numbers_to_any_yaml_reader(name: str) -> None:
    texts = [key for key, value in _leaves(_recipe(name)) if isinstance(value, str) and _looks_numeric(value)]
    assert texts == []  # plain PyYAML reads 2e-4 as text, 2.0e-4 as a number


@pytest.mark.parametrize("name", MODELS)
def test_model_header_tells_what_it_is_and_where_its_sizes_are_from(name: str) -> None:
    header = _header(ROOT / "conf" / "model" / f"{name}.yaml")
    assert len(header) >= 2
    if name != "tiny":
        assert any("gated" in line or "terms" in line for line in header)
        assert header[-1].startswith("# Sizes: ")


@pytest.mark.parametrize("name", MODELS)
def test_model_has_only_known_keys_and_every_size_the_rules_read(name: str) -> None:
    node = _model_file(name)
    shape = ShapeConfig(**node.pop("shape"))
    model = ModelConfig(**node, shape=shape)
    assert model.name_or_path != ModelConfig().name_or_path
    read = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    read += ("head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "num_parameters")
    assert [key for key in read if getattr(shape, key) is None] == []
    assert shape.intermediate_size or shape.moe_intermediate_size


def test_recipe_table_of_the_readme_lists_exactly_the_recipes() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.partition("<!-- recipes -->")[2].partition("<!-- /recipes -->")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", table, flags=re.MULTILINE)
    assert sorted(rows) == sorted(_row(name) for name in RECIPES)


def _row(name: str) -> tuple[str, str, str]:
    path = _model_file(_model_of(name))["name_or_path"]
    purpose = _header(ROOT / "recipes" / f"{name}.yaml")[1].removeprefix("# ")
    return name, purpose, "embedded" if path.startswith("${embedded:") else f"`{path}`"


def _on(config: RunConfig, gpus: int) -> RunFacts:
    launch = replace(config.launch, num_processes=gpus)
    return resolve(replace(config, launch=launch), devices=EIGHT_GPUS)


@cache
def _composed(name: str) -> RunConfig:
    return compose([f"recipe={name}"]).config


@cache
def _distributed(strategy: Strategy) -> DistributedConfig:
    """Recipes leave this group alone, so composing it once with one recipe is composing it with each."""
    return compose(["recipe=tiny_lora", f"distributed={strategy.value}"]).config.distributed


def _recipe(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8"))


def _model_of(name: str) -> str:
    return next(entry["override /model"] for entry in _recipe(name)["defaults"] if "override /model" in entry)


def _model_file(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "conf" / "model" / f"{name}.yaml").read_text(encoding="utf-8"))


def _header(file: Path) -> list[str]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]


def _leaves(node: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(node, dict):
        return [leaf for key, value in node.items() for leaf in _leaves(value, f"{path}.{key}")]
    if isinstance(node, list):
        return [leaf for i, value in enumerate(node) for leaf in _leaves(value, f"{path}.{i}")]
    return [(path, node)]


def _looks_numeric(text: str) -> bool:
    return re.fullmatch(r"[-+]?\d+(\.\d*)?(e[-+]?\d+)?", text, flags=re.IGNORECASE) is not None
