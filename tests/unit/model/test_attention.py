"""Documents in a flattened batch see themselves alone, at the numbers that each would have by itself."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM

from finetune.config.batch import Batch
from finetune.config.rules import RunFacts
from finetune.config.schema import DataConfig, ModelConfig, RunConfig, Strategy
from finetune.errors import Refusal
from finetune.model.attention import PER_DOCUMENT, choose_attention
from tests.tiny_models import SIZES

LENGTHS = [5, 19, 1, 11]


def facts(device: str = "cpu", precision: str = "fp32") -> RunFacts:
    return RunFacts(
        requested_strategy=Strategy.single,
        strategy=Strategy.single,
        device=device,
        num_processes=1,
        batch=Batch(1, 1, 1),
        precision=precision,
        precision_reason="",
        trained_dtype="float32",
        frozen_dtype="float32",
        learning_rate=1e-3,
        positions=None,
        notes=(),
    )


def config(attention: str | None = None, packing: bool = False) -> RunConfig:
    return RunConfig(
        model=ModelConfig(name_or_path="x", attn_implementation=attention), data=DataConfig(packing=packing)
    )


def qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, attn_implementation=PER_DOCUMENT))


def gemma3() -> PreTrainedModel:
    """Sliding windows shorter than the documents, on every second layer."""
    kinds = ["sliding_attention", "full_attention"]
    sizes = Gemma3TextConfig(**SIZES, sliding_window=4, layer_types=kinds, attn_implementation=PER_DOCUMENT)
    return Gemma3ForCausalLM(sizes)


@pytest.mark.parametrize("build", [qwen3, gemma3])
def test_flattened_documents_equal_documents_alone(build: object) -> None:
    torch.manual_seed(0)
    model = build().eval()  # type: ignore[operator]
    documents = [torch.randint(0, 64, (length,)) for length in LENGTHS]
    borders = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    with torch.no_grad():
        flat = model(
            input_ids=torch.cat(documents)[None],
            position_ids=torch.cat([torch.arange(length) for length in LENGTHS])[None],
            cu_seq_lens_q=borders,
            cu_seq_lens_k=borders,
            max_length_q=max(LENGTHS),
            max_length_k=max(LENGTHS),
        ).logits[0]
        model.set_attn_implementation("eager")
        alone = torch.cat([model(input_ids=document[None]).logits[0] for document in documents])
    assert torch.allclose(flat, alone, atol=1e-5)


def test_a_padded_batch_is_masked_as_sdpa_masks_it() -> None:
    torch.manual_seed(0)
    model = qwen3().eval()
    ids = torch.randint(0, 64, (2, 9))
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
    with torch.no_grad():
        ours = model(input_ids=ids, attention_mask=mask).logits
        model.set_attn_implementation("sdpa")
        theirs = model(input_ids=ids, attention_mask=mask).logits
    assert torch.allclose(ours[mask.bool()], theirs[mask.bool()], atol=1e-6)


def test_models_with_a_running_state_keep_padded_batches() -> None:
    linear = Qwen3NextConfig(**SIZES, layer_types=["linear_attention", "full_attention"])
    assert not choose_attention(Qwen3NextForCausalLM, linear, config(), facts()).padding_free
    with pytest.raises(Refusal, match=r"data\.packing=true.*packed rows would see each other"):
        choose_attention(Qwen3NextForCausalLM, linear, config(packing=True), facts())
    chosen = choose_attention(Qwen3ForCausalLM, Qwen3Config(**SIZES), config(packing=True), facts())
    assert chosen.implementation == PER_DOCUMENT
    assert chosen.padding_free


def test_a_kernel_that_was_asked_for_is_the_kernel() -> None:
    chosen = choose_attention(Qwen3ForCausalLM, Qwen3Config(**SIZES), config("eager"), facts())
    assert chosen.implementation == "eager"
    assert not chosen.padding_free
    with pytest.raises(Refusal, match="with attention eager packed rows would see each other"):
        choose_attention(Qwen3ForCausalLM, Qwen3Config(**SIZES), config("eager", packing=True), facts())
