"""Room for every token of the tokenizer: tokens that were added get rows of their own in embedding and head.

Their rows start near the mean of the others (`resize_token_embeddings`) and must be trained: by full
fine-tuning, or beside an adapter as `adapter.modules_to_save`, which then saves embedding and head whole.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from finetune.config.schema import AdapterConfig

log = logging.getLogger(__name__)


def give_rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, adapter: AdapterConfig, seed: int
) -> None:
    """Give the tokens that are new to this model rows that will be trained, the same on every process."""
    text = model.config.get_text_config()
    before, needed = text.vocab_size, len(tokenizer)
    if needed <= before or not adapter.trains_embeddings:
        return
    torch.manual_seed(seed)
    model.resize_token_embeddings(needed)
    added = tokenizer.convert_ids_to_tokens(list(range(before, needed)))
    shown = ", ".join(added[:5]) + (", ..." if len(added) > 5 else "")
    log.info("tokens    %s new to the model: %s; %s rows instead of %s", len(added), shown, needed, before)


def rows_of_adapter(folder: Path, model: PreTrainedModel) -> int:
    """How many tokens the model has under a saved adapter; the model's own number where it says nothing."""
    embedding = model.get_input_embeddings()
    rows: int = embedding.weight.shape[0]
    file = folder / "adapter_model.safetensors"
    if not file.exists():
        return rows
    name = next(name for name, module in model.named_modules() if module is embedding)
    prefix = f"base_model.model.{name}."
    with safe_open(file, framework="pt") as opened:
        shapes = {key: opened.get_slice(key).get_shape() for key in opened.keys()}  # noqa: SIM118
    inside = {key: shape for key, shape in shapes.items() if key.startswith(prefix)}
    found = [shape[0] for key, shape in inside.items() if key.endswith("weight")]
    found += [shape[1] for key, shape in inside.items() if "lora_embedding_A" in key]
    found += [shape[0] for key, shape in shapes.items() if key.endswith("lm_head.weight")]
    return next(iter(found), rows)


def make_room(base: PreTrainedModel, folder: Path) -> int:
    """Give a base as many rows as a saved adapter was trained with; returns their number."""
    wanted = rows_of_adapter(folder, base)
    if wanted != base.get_input_embeddings().weight.shape[0]:
        base.resize_token_embeddings(wanted, mean_resizing=False)
    return wanted
