"""What the libraries of a run keep in memory: today's, and those that published rows were measured with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Recompute(StrEnum):
    """Which activations are kept for the backward pass."""

    none = "none"
    """All of them are kept."""
    full = "full"
    """The inputs of the layers are kept; a layer is run again in its backward pass."""
    selective = "selective"
    """torchtitan's: the layer inputs, attention's output and every second matrix product are kept."""
    offload = "offload"
    """Unsloth's: as `full`, with the inputs of the layers in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What autograd keeps for each layer, and how weights are gathered. The defaults are this project's own
    runs: transformers' eager modules, attention by torch, TRL's fused head, FSDP2.
    """

    logit_bytes: float | None = None
    """Bytes for each token and entry of the vocabulary at the peak of the loss; null: TRL's fused head, which
    works in tiles of a fixed size (`trl/kernels/chunked_logprob.py`)."""
    triton: bool = True
    """That head runs as a kernel, inside its tile; on a CPU torch makes further tiles."""
    fused_norm: bool = False
    """A norm keeps its input as it is (Liger, Unsloth) instead of a float32 copy."""
    repeats_keys: bool = False
    """Keys and values are written out for every query head before attention."""
    fused_projections: bool = False
    """Queries, keys and values are one matrix, whose whole output stays while any part of it is needed."""
    fused_mlp: bool = False
    """Gate and up alone are kept, their gradients are made in place, and adapters read their inputs as they
    are (Unsloth's kernels)."""
    float32_residual: bool = False
    """Hidden states travel between layers in float32 (peft's `prepare_model_for_kbit_training`)."""
    float32_rest: bool = False
    """The same function turns embedding, head and norms into float32 (TRL turns the first two back)."""
    autocast: bool = True
    """Matrix products run in the compute precision whatever their inputs are."""
    eager_attention: bool = False
    """The scores of all pairs of tokens are written out."""
    copies_attention: bool = True
    """Attention's result is copied for the matrix behind it (our kernel for documents)."""
    keeps_quantised_inputs: bool = False
    """bitsandbytes of 2023 kept the input of a quantised matrix."""
    experts_in_turn: bool = False
    """Experts work one after the other (transformers before 5) instead of in one grouped product."""
    recomputed_output: bool = False
    """Re-entrant recomputation holds the output of the layer that is run again."""
    extra_kept: float = 0.0
    """Further bytes for each entry of the hidden state that a layer kept: measured, not explained."""
    fsdp: int = 2
    """1: the old FullyShardedDataParallel, which keeps embedding and head gathered, and one gradient of the
    input for each frozen layer until the backward pass ends."""
