"""A narrow model is computed in float32, adapter merged or not, and is afterwards what it was."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from finetune.config.schema import AdapterConfig, Method
from finetune.model.adapter import attach_adapter
from finetune.model.float32 import in_float32
from tests.tiny_models import SIZES, experts

IDS = torch.arange(40).reshape(2, 20)


@pytest.mark.parametrize("kind", ["dense", "experts"])
@torch.no_grad()
def test_a_narrow_model_is_computed_in_float32_and_stays_as_it_was(kind: str) -> None:
    torch.manual_seed(0)
    base: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**SIZES)) if kind == "dense" else experts()
    method = AdapterConfig(method=Method.lora, r=4, use_dora=kind == "dense", experts=kind == "experts")
    model = attach_adapter(base.bfloat16(), method, seed=1).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += 0.05 * torch.randn_like(parameter)
    before = {name: (p.dtype, p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    with in_float32(model):
        apart = model(input_ids=IDS).logits
    with in_float32(model, merged=True):
        merged = model(input_ids=IDS).logits
    for name, parameter in model.named_parameters():
        dtype, place, value = before[name]
        assert (parameter.dtype, parameter.data_ptr()) == (dtype, place), name
        assert torch.equal(parameter, value), name
    narrow = model(input_ids=IDS).logits.float()
    wide = model.float()(input_ids=IDS).logits
    assert (apart - wide).abs().max() < 1e-5 * wide.abs().max()
    assert (merged - wide).abs().max() < 1e-5 * wide.abs().max()
    assert (narrow - wide).abs().max() > 1e-3 * wide.abs().max(), "nothing to tell apart"


@torch.no_grad()
def test_a_layer_that_casts_to_the_dtype_of_its_weights_is_computed_in_float32_too() -> None:
    class Casting(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs.to(self.weight.dtype)).to(self.weight.dtype)

    torch.manual_seed(0)
    model, inputs = Casting(32, 32).bfloat16(), torch.randn(4, 32)
    with in_float32(model):
        wide = model(inputs)
    narrow = model(inputs)
    assert wide.dtype is torch.float32
    assert torch.equal(wide, model.float()(inputs))
    assert not torch.equal(narrow.float(), wide)
