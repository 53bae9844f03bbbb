"""The sizes of a decoder, and the parameters that follow from them: no weights, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

DESCRIBED = "model.shape"


class Norms(StrEnum):
    """Where a layer has norms, and what autograd keeps of them (transformers' modelling files)."""

    pre = "pre"
    """Two of them, before attention and MLP; the result is cast to the model's dtype before the weight
    (LlamaRMSNorm)."""
    sandwich = "sandwich"
    """Four, before and behind both; all in float32 (Gemma3RMSNorm)."""
    layer = "layer"
    """Two of torch's own LayerNorm, which keeps its input as it is (phi, GPT-NeoX, GPT-BigCode)."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix of every layer."""

    name: str
    inputs: int
    outputs: int
    copies: int = 1
    """How often a layer holds it: the number of experts, or 1."""

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs * self.copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder-only transformer, in the words of its config.json."""

    hidden_size: int
    intermediate_size: int
    """Of the MLP, or of each expert."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    num_experts: int = 0
    """0: a dense model."""
    num_experts_per_tok: int = 0
    shared_intermediate_size: int = 0
    """Of the expert that sees every token, where there is one."""
    sliding_window: int | None = None
    gated: bool = True
    """The MLP multiplies by an activated gate (SwiGLU, GeGLU); false: one matrix up, one down."""
    norms: Norms = Norms.pre
    normed_heads: bool = False
    """Queries and keys of each head are normed before attention."""
    num_parameters: int = 0
    """Exact number of the language model, tied embeddings once; 0: the sum of the sizes above."""
    tower_parameters: int = 0
    """Of vision and audio towers that are loaded, and frozen."""

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def key_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices of one layer, under Llama's names."""
        hidden, experts = self.hidden_size, max(self.num_experts, 1)
        return (
            Linear("q_proj", hidden, self.query_size),
            Linear("k_proj", hidden, self.key_size),
            Linear("v_proj", hidden, self.key_size),
            Linear("o_proj", self.query_size, hidden),
            *self._mlp(self.intermediate_size, experts),
            *(self._mlp(self.shared_intermediate_size, 1) if self.shared_intermediate_size else ()),
        )

    def _mlp(self, wide: int, copies: int) -> tuple[Linear, ...]:
        gate = (Linear("gate_proj", self.hidden_size, wide, copies),) if self.gated else ()
        up, down = (
            Linear("up_proj", self.hidden_size, wide, copies),
            Linear("down_proj", wide, self.hidden_size, copies),
        )
        return (*gate, up, down)

    @property
    def head_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """Embedding and head."""
        return self.head_parameters * (1 if self.tie_word_embeddings else 2)

    @property
    def linear_parameters(self) -> int:
        """The matrices of all layers: what quantisation stores in 4 or 8 bits."""
        return sum(linear.parameters for linear in self.linears) * self.num_hidden_layers

    @property
    def parameters(self) -> int:
        return self.num_parameters or self.counted_parameters

    @property
    def counted_parameters(self) -> int:
        """The sum of the sizes: matrices, embeddings, routers, norms."""
        norms = (4 if self.norms is Norms.sandwich else 2) * self.hidden_size
        small = (norms + self.num_experts * self.hidden_size) * self.num_hidden_layers + self.hidden_size
        return self.linear_parameters + self.embedding_parameters + small

    @property
    def layer_parameters(self) -> int:
        """Of one layer."""
        return (self.parameters - self.embedding_parameters) // self.num_hidden_layers

    @property
    def active_parameters(self) -> int:
        """Those that work on one token: all but the experts that are not chosen."""
        idle = 1 - self.num_experts_per_tok / self.num_experts if self.num_experts else 0
        experts = sum(linear.parameters for linear in self.linears if linear.copies > 1)
        return self.parameters - int(idle * experts * self.num_hidden_layers)
