"""Models of a few thousand random weights, of the kinds that need care."""

from __future__ import annotations

from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def experts() -> PreTrainedModel:
    """In memory the experts of a layer are one stacked tensor, in the checkpoint one tensor each."""
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    )


def multimodal() -> PreTrainedModel:
    """A language model beside a vision tower whose layers have the same names."""
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(text_config=SIZES, vision_config=vision, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config)
