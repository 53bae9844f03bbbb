"""Lets a model answer: prompts of any lengths in one batch, up to its own stop tokens."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

NEW_TOKENS = 512
"""Where neither the saved generation config nor the user says how long an answer may be."""


@dataclass(frozen=True, slots=True)
class Said:
    """One answer."""

    text: str
    tokens: int
    """New tokens, the stop token included."""
    finished: bool
    """It ended with a stop token, and was not cut off."""


def greedy(model: PreTrainedModel | PeftModel, max_new_tokens: int) -> GenerationConfig:
    """The likeliest token each time, with the stop tokens that the model was saved with."""
    own = model.generation_config
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id,
        bos_token_id=own.bos_token_id,
    )


def sampling(
    model: PreTrainedModel | PeftModel, temperature: float | None, max_new_tokens: int | None
) -> GenerationConfig:
    """The generation config that the model was saved with, with what is said over it; 0 degrees: greedy."""
    config = deepcopy(model.generation_config)
    if temperature == 0:
        config.do_sample = False
        config.temperature = config.top_p = config.top_k = config.min_p = None
    elif temperature is not None:
        config.do_sample, config.temperature = True, temperature
    config.max_new_tokens = max_new_tokens or config.max_new_tokens or NEW_TOKENS
    config.max_length = None
    return config


def answer_all(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    config: GenerationConfig,
    streamer: Any = None,
    synced: bool = False,
) -> list[Said]:
    """Answer a batch; padded on the left, so that every answer begins where its prompt ends.

    `synced`: every process answers it, and goes on until all are done.
    """
    pad = next(pad for pad in (tokenizer.pad_token_id, config.pad_token_id, 0) if pad is not None)
    longest = max(map(len, prompts))
    padded = [[pad] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    config = deepcopy(config)
    config.pad_token_id = pad
    said = model.generate(
        input_ids=torch.tensor(padded, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        generation_config=config,
        streamer=streamer,
        synced_gpus=synced,
    )
    stops = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return [_said(tokenizer, row, stops) for row in said[:, longest:].tolist()]


def _said(tokenizer: PreTrainedTokenizerBase, tokens: list[int], stops: list[int | None]) -> Said:
    end = next((at for at, token in enumerate(tokens) if token in stops), None)
    kept = tokens if end is None else tokens[:end]
    text = tokenizer.decode(kept, skip_special_tokens=True).strip()
    return Said(text, len(kept) + (end is not None), end is not None)
