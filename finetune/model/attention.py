"""Attention that never pays for padding and never lets one row see another, with torch's own kernel.

A batch is laid out as one long row with the borders of its documents (`cu_seq_lens_q`), the layout that
flash-attn reads. Where flash-attn is not installed, plain `sdpa` would build the mask of the full square and
pay for it (on CPU about half the speed); here each document is attended by itself, which is the same sum
without the masked part.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from finetune.config.rules import RunFacts
from finetune.config.schema import RunConfig
from finetune.errors import refuse

PER_DOCUMENT = "sdpa_per_document"


@dataclass(frozen=True, slots=True)
class Attention:
    """The kernel to load the model with."""

    implementation: str | None
    """transformers' name; null: transformers chooses."""
    padding_free: bool
    """Whether batches may be laid out without padding, each document seeing itself alone."""


def choose_attention(
    model_class: type[PreTrainedModel], checkpoint: PretrainedConfig, config: RunConfig, facts: RunFacts
) -> Attention:
    """The best kernel installed for this model; packing is refused where rows would see each other."""
    chosen = _choose(model_class, checkpoint, config.model.attn_implementation, facts)
    if config.data.packing and not chosen.padding_free:
        raise refuse(
            "data.packing=true",
            f"with attention {chosen.implementation or 'of this model'} packed rows would see each other.",
            "Leave data.packing out; or model.attn_implementation, where it was set.",
            subject="the model",
        )
    return chosen


def _choose(
    model_class: type[PreTrainedModel], config: PretrainedConfig, asked: str | None, facts: RunFacts
) -> Attention:
    """The kernel, and whether documents stay apart in it.

    Layers that carry a state along the row (linear attention, convolutions) leak from document to document in
    a flattened batch, so their models keep padded batches.
    """
    if not issubclass(model_class, PreTrainedModel):  # code that ships with the checkpoint
        return Attention(asked, False)
    text = config.get_text_config()
    layer_types = set(text.to_dict().get("layer_types") or ["full_attention"])
    separable = (
        layer_types <= {"full_attention", "sliding_attention"} and model_class._supports_attention_backend
    )
    if asked is not None and asked not in ("sdpa", PER_DOCUMENT):
        return Attention(asked, separable and asked.startswith("flash_attention"))
    flash = facts.device == "cuda" and facts.precision != "fp32" and model_class._supports_flash_attn
    if asked is None and flash and importlib.util.find_spec("flash_attn") is not None:
        return Attention("flash_attention_2", separable)
    if not model_class._supports_sdpa:
        return Attention(None, False)
    return Attention(PER_DOCUMENT, True) if separable else Attention("sdpa", False)


def per_document_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each document of a flattened batch.

    Args:
        query, key, value: `(1, heads, tokens, head_dim)`; key and value may have fewer heads.
        cu_seq_lens_q: int32 `(documents + 1,)`, where each document starts; null: an ordinary padded batch,
        which
            transformers' own sdpa attends.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
    lengths = document_lengths(cu_seq_lens_q)
    window = kwargs.get("sliding_window")
    documents = zip(*(states.split(lengths, dim=2) for states in (query, key, value)), strict=True)
    attended = [
        torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=_band(length, window, q.device) if window is not None and length > window else None,
            is_causal=window is None or length <= window,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        for (q, k, v), length in zip(documents, lengths, strict=True)
    ]
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous(), None


_lengths: WeakIdKeyDictionary = WeakIdKeyDictionary()


def document_lengths(borders: torch.Tensor) -> list[int]:
    """Tokens of each document; read from the card once a batch, not once a layer."""
    if borders not in _lengths:
        _lengths[borders] = borders.diff().tolist()
    lengths: list[int] = _lengths[borders]
    return lengths


def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """True where a token may look: itself and the `window - 1` tokens before it."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


def _mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """No mask for a flattened batch (its borders travel as `cu_seq_lens_q`), sdpa's own for a padded one."""
    if attention_mask is None:
        return None
    return sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


AttentionInterface.register(PER_DOCUMENT, per_document_attention)
AttentionMaskInterface.register(PER_DOCUMENT, _mask)
