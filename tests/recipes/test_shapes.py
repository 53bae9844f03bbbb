"""The sizes of conf/model are exact: every architecture is built from its YAML alone and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

CONF = Path(__file__).parents[2] / "conf" / "model"
MODELS: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text()) for path in CONF.glob("*.yaml")
}
COUNTS = ("num_parameters", "tower_parameters")

SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
    "vision_use_head": False,
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "head_dim": 64,
    "image_size": 1540,
    "patch_size": 14,
}
GEMMA4_SMALL = {"use_clipped_linears": True}
GEMMA4_LARGE = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "standardize": True,
}


def _qwen_vision(depth: int, hidden: int, intermediate: int, heads: int, out: int) -> dict[str, int]:
    names = ("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size")
    return dict(zip(names, (depth, hidden, intermediate, heads, out), strict=True))


TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4b": ("gemma3", {"vision_config": SIGLIP}),
    "gemma12b": ("gemma3", {"vision_config": SIGLIP}),
    "gemma27b": ("gemma3", {"vision_config": SIGLIP}),
    "gemma4_e2b": ("gemma4", {"vision_config": GEMMA4_SMALL, "audio_config": {}}),
    "gemma4_e4b": ("gemma4", {"vision_config": GEMMA4_SMALL, "audio_config": {}}),
    "gemma4_12b": ("gemma4_unified", {"vision_config": {}, "audio_config": {}}),
    "gemma4_31b": ("gemma4", {"vision_config": GEMMA4_LARGE}),
    "gemma4_26b_a4b": ("gemma4", {"vision_config": GEMMA4_LARGE}),
    "ministral3_3b": ("mistral3", {"vision_config": PIXTRAL}),
    "ministral3_8b": ("mistral3", {"vision_config": PIXTRAL}),
    "ministral3_14b": ("mistral3", {"vision_config": PIXTRAL}),
    "qwen3_5_0_8b": ("qwen3_5", {"vision_config": _qwen_vision(12, 768, 3072, 12, 1024)}),
    "qwen3_5_2b": ("qwen3_5", {"vision_config": _qwen_vision(24, 1024, 4096, 16, 2048)}),
    "qwen3_5_4b": ("qwen3_5", {"vision_config": _qwen_vision(24, 1024, 4096, 16, 2560)}),
    "qwen3_5_9b": ("qwen3_5", {"vision_config": _qwen_vision(27, 1152, 4304, 16, 4096)}),
    "qwen3_5_27b": ("qwen3_5", {"vision_config": _qwen_vision(27, 1152, 4304, 16, 5120)}),
    "qwen3_5_35b_a3b": ("qwen3_5_moe", {"vision_config": _qwen_vision(27, 1152, 4304, 16, 2048)}),
}
"""The whole model's type and its other towers, as in the checkpoints' config.json."""

PUBLISHED = {
    "gemma270m": 268_098_176,
    "gemma1b": 999_885_952,
    "gemma4b": 4_300_079_472,
    "gemma12b": 12_187_325_040,
    "gemma27b": 27_432_406_640,
    "gemma4_e2b": 5_123_178_051,
    "gemma4_e4b": 7_996_156_490,
    "gemma4_12b": 11_959_730_224,
    "gemma4_31b": 31_273_088_876,
    "gemma4_26b_a4b": 25_805_936_206,
    "gptoss20b": 20_914_757_184,
    "gptoss120b": 116_829_156_672,
    "llama1b": 1_235_814_400,
    "llama3b": 3_212_749_824,
    "llama8b": 8_030_261_248,
    "llama70b": 70_553_706_496,
    "ministral3_3b": 3_849_090_048,
    "ministral3_8b": 8_918_026_716,
    "ministral3_14b": 13_945_032_240,
    "ministral8b": 8_019_808_256,
    "mistral7b": 7_248_023_552,
    "mistral24b": 23_572_403_200,
    "olmo3_7b": 7_298_011_136,
    "olmo3_32b": 32_233_522_176,
    "phi4": 14_659_507_200,
    "phi4_mini": 3_836_021_760,
    "qwen0_6b": 751_632_384,
    "qwen1_7b": 2_031_739_904,
    "qwen4b": 4_022_468_096,
    "qwen8b": 8_190_735_360,
    "qwen14b": 14_768_307_200,
    "qwen32b": 32_762_123_264,
    "qwen30b_a3b": 30_532_122_624,
    "qwen3_5_0_8b": 873_438_784,
    "qwen3_5_2b": 2_274_069_824,
    "qwen3_5_4b": 4_659_865_088,
    "qwen3_5_9b": 9_653_104_368,
    "qwen3_5_27b": 27_781_427_952,
    "qwen3_5_35b_a3b": 35_951_822_704,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1_7b": 1_711_376_384,
    "smollm3_3b": 3_075_098_624,
}
"""Elements of all tensors of the checkpoint as the hub counts them (`safetensors.total`)."""


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_language_model_built_from_the_yaml_has_the_stated_number_of_parameters(name: str) -> None:
    shape = MODELS[name]["shape"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**_sizes(shape)))
    assert _count(model) == shape["num_parameters"]


@pytest.mark.parametrize("name", sorted(TOWERS))
def test_the_towers_hold_what_the_whole_model_has_beyond_its_language_model(name: str) -> None:
    shape = MODELS[name]["shape"]
    model_type, towers = TOWERS[name]
    config = AutoConfig.for_model(
        model_type, text_config=_sizes(shape), tie_word_embeddings=shape["tie_word_embeddings"], **towers
    )
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    assert _count(model) - shape["num_parameters"] == shape["tower_parameters"]


def test_every_model_with_towers_is_counted_with_them() -> None:
    assert {name for name, model in MODELS.items() if model["shape"].get("tower_parameters")} == set(TOWERS)


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"tiny"}))
def test_the_published_checkpoint_holds_exactly_these_parameters(name: str) -> None:
    shape = MODELS[name]["shape"]
    held = shape["num_parameters"] + shape.get("tower_parameters", 0) + _stored_beside_parameters(name, shape)
    assert held == PUBLISHED[name]


def test_the_embedded_model_is_the_one_described() -> None:
    config = AutoConfig.from_pretrained(CONF.parents[1] / "finetune" / "embedded" / "tiny")
    stated = _sizes(MODELS["tiny"]["shape"])
    assert {key: getattr(config, key) for key in stated} == stated


def _sizes(shape: dict[str, Any]) -> dict[str, Any]:
    """The keys of `shape` as the architecture's configuration class takes them."""
    own = {key: value for key, value in shape.items() if key not in (*COUNTS, "extra")}
    return own | shape.get("extra", {})


def _count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _stored_beside_parameters(name: str, shape: dict[str, Any]) -> int:
    """Elements that a checkpoint stores and the model does not have as parameters."""
    layers, hidden = shape["num_hidden_layers"], shape["hidden_size"]
    if name in ("qwen0_6b", "qwen1_7b"):
        return shape["vocab_size"] * hidden  # a second copy of the tied embeddings
    if name in ("ministral3_8b", "ministral3_14b"):
        return layers * 7 * 2  # scales of the fp8 copy, which is the one that was counted
    if name.startswith("qwen3_5_"):
        return _multi_token_prediction(shape)
    if name in ("gemma4_31b", "gemma4_26b_a4b"):
        return layers + 2 * GEMMA4_LARGE["hidden_size"]  # a scalar a layer; mean and deviation of images
    if name == "gemma4_12b":
        return layers
    if name.startswith("gemma4_"):
        return layers + _unused_keys_and_values(shape)
    return 0


def _multi_token_prediction(shape: dict[str, Any]) -> int:
    """Qwen3.5's head for drafting: one full-attention layer behind a projection of two hidden states."""
    hidden, head = shape["hidden_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    attention = hidden * (2 * queries + 2 * keys + queries) + 2 * head  # queries carry an output gate
    projection_and_norms = 2 * hidden * hidden + 5 * hidden
    experts = shape.get("num_experts")
    if experts is None:
        mlp = 3 * hidden * shape["intermediate_size"]
    else:
        shared = shape["extra"]["shared_expert_intermediate_size"]
        mlp = 3 * hidden * (experts * shape["moe_intermediate_size"] + shared) + experts * hidden + hidden
    return attention + mlp + projection_and_norms


def _unused_keys_and_values(shape: dict[str, Any]) -> int:
    """Gemma 4's small models store keys and values of their last layers, which reuse earlier ones."""
    layers, shared = shape["num_hidden_layers"], shape["extra"]["num_kv_shared_layers"]
    kinds = shape["extra"].get("layer_types") or [
        "full_attention" if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(layers)
    ]
    widths = {"full_attention": shape["extra"]["global_head_dim"], "sliding_attention": shape["head_dim"]}
    heads = shape["num_key_value_heads"]
    reused = [widths[kind] for kind in kinds[layers - shared :]]
    return sum(2 * shape["hidden_size"] * heads * width + width for width in reused)
