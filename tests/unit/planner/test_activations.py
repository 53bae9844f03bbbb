"""What the planner says of a layer's activations is what torch keeps: the live tensors of real models."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from finetune.config.schema import Strategy
from finetune.config.strategy import TRAITS
from finetune.model.attention import PER_DOCUMENT
from finetune.planner.activations import layer_activations
from finetune.planner.job import Adapter, Job
from finetune.planner.optimizer import ADAM
from finetune.planner.placement import Placement
from finetune.planner.shape import Norms, Shape
from finetune.planner.stack import Recompute

HIDDEN, WIDE, HEADS, KEYS, HEAD, VOCABULARY, ROWS = 256, 896, 8, 2, 32, 64, 256
SHAPE = Shape(
    hidden_size=HIDDEN,
    intermediate_size=WIDE,
    num_hidden_layers=1,
    num_attention_heads=HEADS,
    num_key_value_heads=KEYS,
    head_dim=HEAD,
    vocab_size=VOCABULARY,
    tie_word_embeddings=False,
)
SHAPES = {
    LlamaConfig: SHAPE,
    Qwen3Config: replace(SHAPE, normed_heads=True),
    Gemma3TextConfig: replace(SHAPE, normed_heads=True, norms=Norms.sandwich),
    Qwen3MoeConfig: replace(SHAPE, normed_heads=True, num_experts=4, num_experts_per_tok=2),
}
LARGE: dict[str, Any] = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "head_dim": 128},
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERYWHERE = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of tensors that were made under it and are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._seen: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in (t for t in tree_iter(result) if isinstance(t, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage not in self._seen:
                self._seen[storage] = True
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
        return result

    def _gone(self, size: int) -> None:
        self.bytes -= size


def kept_by_torch(
    kind: Any,
    layers: int,
    rows: int,
    dtype: torch.dtype,
    autocast: bool,
    targets: tuple[str, ...],
    dora: bool = False,
    shape: Shape = SHAPE,
    attention: str = PER_DOCUMENT,
) -> int:
    """Bytes alive behind the forward pass of the decoder, its weights aside."""
    sizes: dict[str, Any] = {"moe_intermediate_size": WIDE, "num_experts": 4, "num_experts_per_tok": 2}
    config = kind(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        layer_types=["full_attention"] * layers,
        use_cache=False,
        **(sizes if kind is Qwen3MoeConfig else {}),
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    if targets:
        model = get_peft_model(
            model, LoraConfig(r=1, target_modules=list(targets), use_dora=dora, task_type="CAUSAL_LM")
        )
    tokens, borders = torch.zeros(1, rows, dtype=torch.long), torch.tensor([0, rows], dtype=torch.int32)
    positions = torch.arange(rows)[None]
    live = LiveTensors()
    decoder = model.get_base_model().model if targets else model.model
    precision = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with live, precision:
        cut = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders} if attention == PER_DOCUMENT else {}
        out = decoder(input_ids=tokens, position_ids=positions, **cut)
        bytes_alive = live.bytes
    assert out.last_hidden_state.requires_grad
    return bytes_alive


CASES = [
    (kind, dtype, autocast, targets)
    for kind in SHAPES
    for dtype, autocast, targets in (
        (torch.float32, True, ()),
        (torch.float32, False, ()),
        (torch.bfloat16, False, ()),
        (torch.bfloat16, True, ATTENTION),
        (torch.bfloat16, True, EVERYWHERE),
    )
    # the experts of a mixture are no linear modules; trained in float32 on a CPU they are computed in it
    if not (kind is Qwen3MoeConfig and (targets == EVERYWHERE or (autocast and not targets)))
]


@pytest.mark.parametrize(("kind", "dtype", "autocast", "targets"), CASES)
def test_a_layer_keeps_what_is_planned(
    kind: Any, dtype: torch.dtype, autocast: bool, targets: tuple[str, ...]
) -> None:
    seen = of_a_layer(kind, dtype, autocast, targets)
    assert planned(kind, dtype, autocast, targets) == pytest.approx(seen, rel=0.03)


def test_dora_keeps_both_results() -> None:
    case = (LlamaConfig, torch.bfloat16, True, EVERYWHERE)
    assert planned(*case, dora=True) == pytest.approx(of_a_layer(*case, dora=True), rel=0.03)
    assert planned(*case, dora=True) > 1.5 * planned(*case)


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config, Gemma3TextConfig])
def test_a_layer_of_an_8b_model_keeps_what_is_planned(kind: Any, dtype: torch.dtype, autocast: bool) -> None:
    """With tensors that have no memory (peft's layers do not take them)."""
    shape = replace(SHAPES[kind], **LARGE)
    with FakeTensorMode(allow_non_fake_inputs=True):
        seen = of_a_layer(kind, dtype, autocast, (), shape=shape, attention="sdpa")
    assert planned(kind, dtype, autocast, (), shape=shape) == pytest.approx(seen, rel=0.03)


def of_a_layer(
    kind: Any, dtype: torch.dtype, autocast: bool, targets: tuple[str, ...], dora: bool = False, **size: Any
) -> float:
    """Bytes for each token that torch keeps of one layer: what grows with both layers and rows."""
    seen = {
        (layers, rows): kept_by_torch(kind, layers, rows, dtype, autocast, targets, dora, **size)
        for layers in (1, 3)
        for rows in (ROWS, 2 * ROWS)
    }
    longer, shorter = (seen[3, rows] - seen[1, rows] for rows in (2 * ROWS, ROWS))
    return (longer - shorter) / 2 / ROWS


def planned(
    kind: Any,
    dtype: torch.dtype,
    autocast: bool,
    targets: tuple[str, ...],
    dora: bool = False,
    shape: Shape | None = None,
) -> float:
    held = 4 if dtype is torch.float32 else 2
    job = Job(
        shape=shape or SHAPES[kind],
        adapter=Adapter(r=1, targets=frozenset(targets), dora=dora) if targets else None,
        trained_bytes=4 if targets else held,
        frozen_bytes=held,
        compute_bytes=2 if autocast else held,
        optimizer=ADAM,
        tokens=ROWS,
        row_tokens=ROWS,
        recompute=Recompute.none,
    )
    return layer_activations(Placement(job, TRAITS[Strategy.single], 1)).carried(Recompute.none)
