"""A twin is small, and of its model's own kind: class, special layers, experts, towers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig

from finetune.config.compose import compose
from finetune.config.schema import ModelConfig
from finetune.model.load import checkpoint_class
from finetune.model.tokenizer import load_tokenizer
from finetune.paths import assets, embedded
from finetune.rehearse.every import architectures
from finetune.rehearse.twin import Twin, full_config, make_twin

MODELS = architectures()


def model_of(name: str) -> ModelConfig:
    return compose([f"model={name}", "data=alpaca_cleaned"]).config.model


def twin_of(model: ModelConfig, folder: Path) -> Twin:
    return make_twin(model, load_tokenizer(ModelConfig(name_or_path=str(embedded("tiny")))), folder, seed=0)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_twin_has_every_kind_of_layer_that_its_model_has(name: str, tmp_path: Path) -> None:
    full = full_config(model_of(name)).get_text_config()
    twin = twin_of(model_of(name), tmp_path)
    small = AutoConfig.from_pretrained(tmp_path).get_text_config()
    assert twin.num_parameters < 1_000_000
    assert type(small) is type(full)
    for kinds in ("layer_types", "no_rope_layers"):
        assert set(getattr(small, kinds, None) or ()) == set(getattr(full, kinds, None) or ())
    for experts in ("num_experts", "num_local_experts", "sliding_window", "num_kv_shared_layers"):
        assert bool(getattr(small, experts, None)) == bool(getattr(full, experts, None))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_twin_opens_and_learns(name: str, tmp_path: Path) -> None:
    twin = twin_of(model_of(name), tmp_path)
    kind = checkpoint_class(AutoConfig.from_pretrained(tmp_path))
    assert kind.__name__ == twin.architecture
    assert ("Conditional" in twin.architecture) == ("towers" in MODELS[name])
    model = kind.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(10, 1000, (1, 40))
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(
        p.grad is not None
        for n, p in model.get_decoder().named_parameters()
        if "layers" in n and "expert" not in n
    )


def test_there_is_a_twin_of_every_architecture_of_conf() -> None:
    files = (assets() / "conf" / "model").glob("*.yaml")
    kinds = {yaml.safe_load(file.read_text(encoding="utf-8"))["shape"]["model_type"] for file in files}
    assert {kind.removesuffix(" with towers") for kind in MODELS.values()} == kinds


def test_a_models_own_config_is_shrunk_where_it_is_here(tmp_path: Path) -> None:
    twin = twin_of(ModelConfig(name_or_path=str(embedded("tiny"))), tmp_path)
    own, small = (AutoConfig.from_pretrained(folder) for folder in (embedded("tiny"), tmp_path))
    assert twin.architecture == own.architectures[0]
    assert small.rope_parameters == own.rope_parameters
    assert small.tie_word_embeddings == own.tie_word_embeddings
    assert small.num_hidden_layers < own.num_hidden_layers
