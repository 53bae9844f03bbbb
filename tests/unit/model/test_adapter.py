"""Adapters go on the language model: not on other towers, and on experts only if asked."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from finetune.config.schema import AdapterConfig, Method
from finetune.errors import Refusal
from finetune.model.adapter import attach_adapter
from tests.tiny_models import SIZES, experts, multimodal

LORA = AdapterConfig(method=Method.lora, r=4)


def adapted(model: PreTrainedModel, **changes: object) -> set[str]:
    attached = attach_adapter(model, AdapterConfig(method=Method.lora, r=4, **changes), seed=1)  # type: ignore[arg-type]
    trained = {name: p for name, p in attached.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    return {name.split(".lora_")[0].removeprefix("base_model.model.") for name in trained}


def test_all_linear_layers_but_the_head() -> None:
    names = adapted(Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False)))
    assert {name.rpartition(".")[2] for name in names} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert len(names) == 14


def test_no_adapter_on_a_vision_tower() -> None:
    names = adapted(multimodal())
    assert names
    assert all("language_model" in name for name in names)


def test_experts_and_router_only_if_asked() -> None:
    assert not any("experts" in name or "gate" in name.split(".") for name in adapted(experts()))
    asked = adapted(experts(), experts=True)
    assert any("experts" in name for name in asked)
    assert any("self_attn.q_proj" in name for name in asked)


def test_the_start_is_the_same_for_the_same_seed() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
        torch.rand(7)
        states.append(dict(attach_adapter(model, LORA, seed=5).named_parameters()))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_name_that_no_layer_has_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(Refusal, match=r"(?s)adapter\.target_modules=\['c_attn'\].*q_proj"):
        attach_adapter(
            Qwen3ForCausalLM(Qwen3Config(**SIZES)),
            AdapterConfig(method=Method.lora, target_modules=["c_attn"]),
            seed=1,
        )
