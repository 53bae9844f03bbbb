"""Where a model's sizes come from: its own config.json where that is here, else `model.shape`."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from finetune import hub
from finetune.config.schema import ModelConfig, ShapeConfig
from finetune.errors import Problem, Refusal
from finetune.model.fetch import fetch_config
from finetune.planner.shape import Norms, Shape

SANDWICH = ("gemma2", "gemma3", "gemma4")
NORMED_HEADS = ("qwen3", "gemma3", "gemma4", "olmo2", "olmo3")
LAYER_NORM = ("phi", "gpt_neox", "gpt_bigcode", "gpt2", "gptj", "stablelm", "starcoder2", "falcon")
UNGATED = ("phi", "gpt_neox", "gpt_bigcode", "gpt2", "gptj", "starcoder2", "falcon")
"""What transformers' modelling files of these families do; a name matches with its digits and suffixes."""

NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
TOTALS = ("model_type", "num_parameters", "tower_parameters")
"""Not sizes of a layer: left out when two sources are compared."""
OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("n_inner", "ffn_dim", "d_ff"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head", "num_heads"),
    "num_experts": ("num_local_experts", "n_routed_experts"),
}
"""How older families call the same size."""


class UnknownSizes(Refusal):
    """Neither `model.shape` nor a config.json that is here has the sizes of the model."""


def read_shape(model: ModelConfig, subject: str = "the model") -> Shape:
    """The sizes of a model, without its weights; where nothing here has them its config.json is fetched.

    Raises:
        UnknownSizes: sizes are missing.
        Refusal: `model.shape` contradicts the model's own config.json.
    """
    stored = stored_config(model)
    declared = {name: value for name, value in _declared(model.shape).items() if value is not None}
    problems = [
        Problem(
            f"model.shape.{name}={declared[name]}",
            f"{model.name_or_path} says {stored[name]} in its config.json",
            "Leave the key out, or name the model that is meant.",
        )
        for name in declared.keys() & stored.keys()
        if name not in TOTALS and declared[name] != stored[name]
    ]
    if problems:
        raise Refusal(problems, subject)
    sizes = _completed({**stored, **declared})
    missing = [name for name in NEEDED if not sizes.get(name)]
    if missing and fetch_config(model):
        return read_shape(model, subject)
    if missing:
        where = _keys(missing)
        why = f"these sizes of {model.name_or_path} are not known here: {_nothing_stored(model)}"
        fix = "Set them, or name a local folder of the model; `model=NAME` of conf/model has them."
        if not os.path.isdir(os.path.expanduser(model.name_or_path)):
            where, why = f"model.name_or_path={model.name_or_path}", _nothing_stored(model)
            fix = f"Check it; to plan without its files set {_keys(missing)}."
        raise UnknownSizes([Problem(where, why, fix)], subject)
    return _shape(sizes)


def _keys(names: list[str]) -> str:
    return ", ".join(f"model.shape.{name}" for name in names)


def _nothing_stored(model: ModelConfig) -> str:
    """Why its own config.json does not tell."""
    folder = os.path.expanduser(model.name_or_path)
    if not os.path.isdir(folder):
        return "there is no folder of that name, and the hub's cache has none"
    if not os.path.isfile(os.path.join(folder, "config.json")):
        return "the folder holds no config.json"
    return "its config.json cannot be read, or does not hold them"


def _completed(sizes: dict[str, Any]) -> dict[str, Any]:
    """With what a family leaves out because it follows from the rest."""
    if sizes.get("moe_intermediate_size"):  # a mixture without a dense layer has no other
        sizes.setdefault("intermediate_size", sizes["moe_intermediate_size"])
    if sizes.get("model_type") in UNGATED and sizes.get("hidden_size"):  # GPT-2's n_inner is null by default
        sizes.setdefault("intermediate_size", 4 * sizes["hidden_size"])
    return sizes


def stored_config(model: ModelConfig) -> dict[str, Any]:
    """What config.json of a local folder, or of the hub's cache, says of the language model."""
    folder = Path(os.path.expanduser(model.name_or_path))
    file = folder / "config.json"
    if not folder.exists() and hub.ID.fullmatch(model.name_or_path):
        file = hub.cached_config(model.name_or_path, model.revision) or file
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    text = {**content, **(content.get("text_config") or {})}
    for name, others in OTHER_NAMES.items():
        text.setdefault(name, next((text[other] for other in others if text.get(other)), None))
    known = {name: text[name] for name in ShapeConfig.__dataclass_fields__ if text.get(name) is not None}
    known |= {name: text[name] for name in EXTRA if text.get(name) is not None}
    counted = stored_parameters(folder)
    return known | ({"num_parameters": counted} if counted and "text_config" not in content else {})


EXTRA = ("sliding_window", "shared_expert_intermediate_size", "layer_types", "use_sliding_window")


def stored_parameters(folder: Path) -> int:
    """The weights in a local folder's safetensors, by their headers; 0 where there are none."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total


def _declared(shape: ShapeConfig) -> dict[str, Any]:
    names = [name for name in ShapeConfig.__dataclass_fields__ if name != "extra"]
    return {name: getattr(shape, name) for name in names} | {name: shape.extra.get(name) for name in EXTRA}


def _shape(sizes: dict[str, Any]) -> Shape:
    kind = sizes.get("model_type") or ""
    heads, experts = sizes["num_attention_heads"], sizes.get("num_experts") or 0
    windowed = sizes.get("use_sliding_window") is not False
    return Shape(
        hidden_size=sizes["hidden_size"],
        intermediate_size=(experts and sizes.get("moe_intermediate_size")) or sizes["intermediate_size"],
        num_hidden_layers=sizes["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=sizes.get("num_key_value_heads") or heads,
        head_dim=sizes.get("head_dim") or sizes["hidden_size"] // heads,
        vocab_size=sizes["vocab_size"],
        tie_word_embeddings=bool(sizes.get("tie_word_embeddings")),
        num_experts=experts,
        num_experts_per_tok=sizes.get("num_experts_per_tok") or (1 if experts else 0),
        shared_intermediate_size=sizes.get("shared_expert_intermediate_size") or 0,
        sliding_window=sizes.get("sliding_window") if windowed else None,
        gated=kind not in UNGATED,
        norms=Norms.sandwich
        if kind.startswith(SANDWICH)
        else Norms.layer
        if kind in LAYER_NORM
        else Norms.pre,
        normed_heads=kind.startswith(NORMED_HEADS),
        num_parameters=sizes.get("num_parameters") or 0,
        tower_parameters=sizes.get("tower_parameters") or 0,
    )
