"""The shrunken twin of a model: its own class and every special kind of its layers, few and small."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from finetune.config.schema import ModelConfig, ShapeConfig
from finetune.model.fetch import fetch_config
from finetune.model.load import checkpoint_class, checkpoint_dtype
from finetune.model.tokenizer import turn_end

HEADS = 2
HEAD_DIM = 32
EXPERTS = 4
WINDOW = 16
"""Tokens of a sliding window: rows are longer, so that it really cuts."""
OF_EACH_KIND = 2
"""Layers."""

SMALL = {
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "sliding_window": WINDOW,
    "linear_num_key_heads": HEADS,
    "linear_num_value_heads": HEADS,
    "linear_key_head_dim": HEAD_DIM,
    "linear_value_head_dim": HEAD_DIM,
    "hidden_size_per_layer_input": 16,
}
"""Sizes of a language model, under the names of config.json; a size that a model does not have stays away."""

TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "num_heads": HEADS,
    "head_dim": 16,
    "image_size": 32,
    "patch_size": 16,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "deepstack_visual_indexes": [],
}
"""The same for vision and audio towers, which are frozen."""

WHOLE = {
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4_unified",
    "ministral3": "mistral3",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
"""Which type a checkpoint has that holds such a language model and towers beside it."""


@dataclass(frozen=True, slots=True)
class Twin:
    """A small model on disk that stands for a large one."""

    folder: Path
    architecture: str
    """Name of transformers' class."""
    num_parameters: int
    layers: tuple[str, ...]
    """The kind of each."""


def make_twin(model: ModelConfig, tokenizer: PreTrainedTokenizerFast, folder: Path, seed: int) -> Twin:
    """Write the twin of `model` into `folder`: random weights in the checkpoint's dtype, and the tokenizer.

    Raises:
        ValueError, OSError, ...: transformers cannot build the architecture, in its own words.
    """
    full = full_config(model)
    dtype = checkpoint_dtype(full)
    config = shrunk(full, len(tokenizer))
    torch.manual_seed(seed)
    built = _built(config, model.trust_remote_code).to(dtype)
    stops = turn_end(tokenizer)
    built.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=tokenizer.pad_token_id)
    built.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text = built.config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    return Twin(folder, type(built).__name__, built.num_parameters(), tuple(kinds))


def full_config(model: ModelConfig) -> PretrainedConfig:
    """The model's own config where its config.json is here or can be had, else what `model.shape` says."""
    folder = Path(model.name_or_path).expanduser()
    if folder.is_dir() or fetch_config(model):
        name = str(folder) if folder.is_dir() else model.name_or_path
        revision = model.revision or "main"
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=model.trust_remote_code)
    config = _described(model.shape)
    config.dtype = torch.bfloat16  # as nearly all checkpoints are stored; a shape does not say
    return config


def shrunk(config: PretrainedConfig, vocab_size: int) -> PretrainedConfig:
    """The same kind of config with few small layers, of each kind that the model has."""
    content = config.to_dict()
    content.pop("quantization_config", None)  # stored quantised: a run unpacks it while loading
    text = config.get_text_config()
    small = _small_text(text.to_dict(), vocab_size)
    if text is config:
        return type(config).from_dict({**content, **small})
    parts = {
        name: part for name, part in content.items() if isinstance(part, dict) and name.endswith("_config")
    }
    towers = {name: _small_tower(part, small["hidden_size"]) for name, part in parts.items()}
    whole = {"mm_tokens_per_image": 4} if "mm_tokens_per_image" in content else {}
    return type(config).from_dict({**content, **towers, "text_config": {**text.to_dict(), **small}, **whole})


def _described(shape: ShapeConfig) -> PretrainedConfig:
    """From `model.shape`, with towers of the family's own default kind where the checkpoint has some."""
    given = {name: getattr(shape, name) for name in ShapeConfig.__dataclass_fields__}
    counted = ("num_parameters", "tower_parameters", "extra")
    sizes = {name: value for name, value in given.items() if name not in counted and value is not None}
    sizes |= shape.extra
    if not shape.tower_parameters:
        return AutoConfig.for_model(**sizes)
    tied = sizes.get("tie_word_embeddings", False)
    kind = WHOLE.get(shape.model_type or "", shape.model_type)
    config = AutoConfig.for_model(kind, text_config=sizes, tie_word_embeddings=tied)
    config.architectures = [AutoModelForImageTextToText._model_mapping[type(config)].__name__]
    return config


def _small_text(full: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    small: dict[str, Any] = {name: size for name, size in SMALL.items() if full.get(name)}
    heads, keys = full["num_attention_heads"], full.get("num_key_value_heads") or full["num_attention_heads"]
    head_dim = full.get("head_dim") or full["hidden_size"] // heads
    listed = any(isinstance(value, list) for value in _leaves(full.get("rope_parameters") or {}))
    own_dim = head_dim if listed else HEAD_DIM  # lists of factors are as long as a head is wide
    chosen = _rounds(full)
    count = full["num_hidden_layers"]
    small |= {
        name: [value[layer] for layer in chosen]
        for name, value in full.items()
        if isinstance(value, list) and len(value) == count and count > 1
    }
    small |= {
        "num_hidden_layers": len(chosen),
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS if keys == heads else 1,
        "head_dim": own_dim,
        "hidden_size": HEADS * own_dim if head_dim * heads == full["hidden_size"] else HEADS * HEAD_DIM,
        "vocab_size": vocab_size,
    }
    if full.get("vocab_size_per_layer_input"):
        small["vocab_size_per_layer_input"] = vocab_size
    if full.get("num_kv_shared_layers"):  # the last round shares what the first one computed
        small["num_kv_shared_layers"] = len(chosen) // OF_EACH_KIND
    if full.get("per_layer_config"):
        wide = {"head_dim": 2 * own_dim, "num_key_value_heads": 1}
        layers = [new for new, old in enumerate(chosen) if f"{old:02d}" in full["per_layer_config"]]
        small["per_layer_config"] = {f"{layer:02d}": wide for layer in layers}
    return small | _ids_within(full, vocab_size)


def _rounds(full: dict[str, Any]) -> list[int]:
    """Numbers of the layers that stay: the first of each kind, then the second of each."""
    count = full["num_hidden_layers"]
    marks = [full[name] for name in ("layer_types", "no_rope_layers") if full.get(name)]
    kinds: dict[Any, list[int]] = {}
    for layer in range(count):
        kinds.setdefault(tuple(mark[layer] for mark in marks), []).append(layer)
    return [layers[turn] for turn in range(OF_EACH_KIND) for layers in kinds.values() if turn < len(layers)]


def _small_tower(full: dict[str, Any], text_hidden_size: int) -> dict[str, Any]:
    small = {name: size for name, size in TOWER.items() if full.get(name)}
    if "out_hidden_size" in full:
        small["out_hidden_size"] = text_hidden_size
    return {**full, **small}


def _ids_within(full: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Ids of special tokens that this tokenizer does not have are left out."""
    ids = {name: value for name, value in full.items() if name.endswith("_token_id") and value is not None}
    out = {
        name: value
        for name, value in ids.items()
        if max([value] if isinstance(value, int) else value) >= vocab_size
    }
    return dict.fromkeys(out)


def _built(config: PretrainedConfig, trusted: bool) -> Any:
    kind = checkpoint_class(config)
    if kind is AutoModelForCausalLM:
        return kind.from_config(config, trust_remote_code=trusted)
    return kind(config)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in _leaves(inner)]
    return [value]
