"""What autograd keeps of one layer, in bytes for each token, read off the operations of transformers' models.

An entry of a hidden state is one number; `hidden`, `wide`, `queries`, `keys` are how many a token has. The
sums are checked against torch itself by the tests, which count the live tensors of real models.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.planner.job import Job
from finetune.planner.placement import Placement
from finetune.planner.shape import Norms
from finetune.planner.stack import Recompute

ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj")
MLP_INPUTS = ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class Layer:
    """Bytes for each token."""

    input: float
    """The hidden state that the layer reads."""
    kept: float
    """What its backward pass reads, the input aside."""
    working: float
    """What its backward pass makes on top, at the worst moment (inside the MLP)."""
    keeps_input: bool
    """Whether the input stays without recomputation, too."""

    def carried(self, recompute: Recompute) -> float:
        """What one layer leaves behind until its backward pass."""
        if recompute is Recompute.full:
            return self.input
        if recompute is Recompute.offload:
            return 0.0
        return self.kept + (self.input if self.keeps_input else 0.0)


def layer_activations(place: Placement) -> Layer:
    """The activations of one layer."""
    kept = _norms(place) + _attention(place) + _mlp(place) + _magnitudes(place)
    if place.job.recompute is Recompute.selective:
        kept = _selective(place.job)
    keeps_input = (
        place.residual_bytes >= 4 or place.job.stack.fused_norm or place.job.recompute is Recompute.selective
    )
    return Layer(place.hidden_bytes, kept, _working(place), keeps_input)


def _norms(place: Placement) -> float:
    """A float32 copy of the input, and the normed value before the weight where the weight is trained."""
    job, shape = place.job, place.job.shape
    full, hidden, heads = job.adapter is None, shape.hidden_size, shape.query_size + shape.key_size
    float32 = place.residual_bytes >= 4  # then the copy is the hidden state itself
    if shape.norms is Norms.layer:
        return place.hidden_bytes
    if job.stack.fused_norm:
        return place.hidden_bytes
    normed = 4 if shape.norms is Norms.sandwich else place.residual_bytes
    count = 4 if shape.norms is Norms.sandwich else 2
    kept = (count - float32) * 4 * hidden + full * count * normed * hidden
    if shape.normed_heads:
        kept += heads * (4 + full * (4 if shape.norms is Norms.sandwich else job.compute_bytes))
    return kept


def _attention(place: Placement) -> float:
    """Queries, keys, values and the result, and the inputs of the matrices around them."""
    job, shape, stack = place.job, place.job.shape, place.job.stack
    keys = shape.query_size if stack.repeats_keys else shape.key_size
    kept: float = job.compute_bytes * (2 * shape.query_size + 2 * keys) + 4 * shape.num_attention_heads
    if stack.fused_projections:
        kept += job.compute_bytes * (shape.query_size + keys)
    kept += stack.extra_kept * shape.hidden_size
    if stack.eager_attention:  # softmax in float32, and its copy in the compute precision
        kept += (4 + job.compute_bytes) * shape.num_attention_heads * min(job.row_tokens, job.tokens)
    kept += _inputs(place, ATTENTION_INPUTS)
    if not _shares(place, "o_proj"):
        kept += _inputs(place, ("o_proj",))
    return kept


def _mlp(place: Placement) -> float:
    """Gate, up and their product for each expert that a token sees."""
    job, shape = place.job, place.job.shape
    times = shape.num_experts_per_tok or 1
    wide = shape.intermediate_size * times + shape.shared_intermediate_size
    expert_inputs = bool(shape.num_experts) and (job.adapter is None or job.adapter.experts)
    kept: float = _gates(place) * job.compute_bytes * wide + _inputs(place, MLP_INPUTS)
    if _trains(place, "down_proj") and not job.stack.fused_mlp:
        kept += job.compute_bytes * wide
    if shape.num_experts:  # the result before it is weighted; the rows as they are sorted to experts
        kept += job.compute_bytes * shape.hidden_size * times * (1 + expert_inputs)
    return kept


def _gates(place: Placement) -> int:
    """Tensors of the MLP's width: gate, its activation and up."""
    if not place.job.shape.gated:
        return 1
    return 2 if place.job.stack.fused_mlp else 3


def _working(place: Placement) -> float:
    """Gradients inside the MLP, and the gradient of the layer's output."""
    job, shape = place.job, place.job.shape
    times = float(shape.num_experts_per_tok or 1)
    if shape.num_experts and job.stack.experts_in_turn:
        times /= shape.num_experts
    wide = shape.intermediate_size * times + shape.shared_intermediate_size
    if _adapts(place, "down_proj") and place.casts_adapters:
        widths = 8.0  # the adapter's gradient of its input in float32, its cast, and the base's own
    else:
        product = job.compute_bytes if _trains(place, "down_proj") and not job.stack.fused_mlp else 0
        widths = (3 if shape.gated else 2) * job.compute_bytes - product
    return widths * wide + place.hidden_bytes


def _magnitudes(place: Placement) -> float:
    """DoRA scales the results of base and adapter, so both are kept."""
    job = place.job
    if job.adapter is None or not job.adapter.dora:
        return 0.0
    outputs = sum(linear.outputs for linear in job.shape.linears if job.adapter.on(linear))
    return 2.0 * job.compute_bytes * outputs


def _inputs(place: Placement, names: tuple[str, ...]) -> float:
    """Copies of an input that several matrices share."""
    job = place.job
    linears = [lin for lin in job.shape.linears if lin.name in names]
    width = linears[0].inputs
    if job.adapter is None:
        casts = place.residual_bytes > job.compute_bytes and "o_proj" not in names
        return job.compute_bytes * width * (len(linears) if casts else 1)
    adapted = sum(job.adapter.on(linear) for linear in linears)
    apart = place.casts_adapters or job.adapter.dropout
    kept = (adapted if apart else min(adapted, 1)) * place.adapter_input_bytes * width
    if job.adapter.dropout:  # which entries were dropped, a byte each
        kept += adapted * width
    if place.keeps_quantised_inputs and (apart or not adapted):
        kept += job.compute_bytes * width
    return kept


def _adapts(place: Placement, name: str) -> bool:
    adapter = place.job.adapter
    return adapter is not None and any(
        lin.name == name and adapter.on(lin) for lin in place.job.shape.linears
    )


def _trains(place: Placement, name: str) -> bool:
    """Whether the input of a matrix is kept: its weight or adapter is trained, or bitsandbytes keeps it."""
    return place.job.adapter is None or _adapts(place, name) or place.keeps_quantised_inputs


def _shares(place: Placement, name: str) -> bool:
    """Whether the input of `o_proj` is attention's result itself, kept already."""
    if place.job.stack.copies_attention and place.job.adapter is None:
        return False
    adapter = place.job.adapter
    return not (_adapts(place, name) and (place.casts_adapters or (adapter is not None and adapter.dropout)))


def _selective(job: Job) -> float:
    """torchtitan's `op` policy: attention's result and every second of the seven matrix products
    (queries, values, gate, down), beside the input of the layer."""
    shape = job.shape
    products = shape.query_size + shape.key_size + shape.intermediate_size + shape.hidden_size
    return job.compute_bytes * (products + shape.query_size)
