"""Peak memory of one device: the states that stay, and what each phase of a step adds to them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from finetune.planner.activations import Layer, layer_activations
from finetune.planner.placement import Placement
from finetune.planner.stack import Recompute
from finetune.planner.states import (
    States,
    communication_buffers,
    gathered_weights,
    model_states,
    step_copies,
    weight_casts,
)

GIB = 2**30
TILE_TOKENS, TILE_VOCABULARY = 4096, 32768
"""Size of a tile of TRL's fused head (TOKEN_CHUNK_SIZE, _CHUNKED_LOGPROB_CHUNK_SIZE)."""
MADE_FORWARD, MADE_BACKWARD = 3 * 4.0, 7 * 4 + 1.0
"""Bytes for each entry of a tile that it makes in float32 (and a mask) without Triton, tensors counted in
`_forward_tile` and `_backward_tile`."""

ALLOCATOR_BYTES = 0.8 * GIB
"""Reserved beside what is allocated in any run: workspaces and rounding of torch's caching allocator."""
CACHED_SHARE = 0.07
"""Of the activations, what the allocator cannot hand out again."""
KEPT_SHARE = {True: 0.2, False: CACHED_SHARE}
"""The same at worst, with sharded weights (their gathering cuts the cache into pieces) and without."""
STEP_SHARE = 0.15
"""Of what the optimizer step builds, what the activations cannot use."""
STATES_ERROR, ACTIVATIONS_ERROR = 0.01, 0.03
"""By how much sizes may be larger than expected."""
RESERVED_ERROR = 0.04
"""The same for what is reserved, of what is allocated: 95 of 100 published rows lie below it."""


class Phase(StrEnum):
    """The moments of a step at which memory peaks."""

    forward = "forward pass"
    loss = "loss"
    first = "first layer of the backward pass"
    last = "last layer of the backward pass"
    step = "optimizer step"
    evaluate = "evaluation"


@dataclass(frozen=True, slots=True)
class Bound:
    """A size in bytes, as expected and at most."""

    expected: float
    upper: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one device, in bytes."""

    states: States
    activations: float
    """What is kept of all layers, and the one that works."""
    logits: float
    phases: dict[Phase, float]
    """What each phase adds to the states that last."""
    layer: float
    """What the layer at work takes in the backward pass."""
    untouched: float
    """Of the backward pass, what a host gives no memory for."""
    sharded: bool

    @property
    def peak_phase(self) -> Phase:
        return max(self.phases, key=lambda phase: self.phases[phase])

    @property
    def other(self) -> float:
        """What the peak holds beside states, activations and logits."""
        return max(self.allocated.expected - self.states.total - self.activations - self.logits, 0.0)

    @property
    def allocated(self) -> Bound:
        """The most that tensors take at one moment (torch's `max_memory_allocated`)."""
        expected = self.states.lasting + max(self.phases.values())
        unsure = STATES_ERROR * expected + ACTIVATIONS_ERROR * (self.activations + self.logits)
        return Bound(expected, expected + unsure)

    @property
    def reserved(self) -> Bound:
        """What the caching allocator holds for it where there is room (`max_memory_reserved`): blocks cut for
        the logits do not serve the layers, nor the other way round.
        """
        expected = self.allocated.expected + ALLOCATOR_BYTES + CACHED_SHARE * (self.activations - self.layer)
        expected += min(self.logits, self.layer)
        upper = self.needed + ALLOCATOR_BYTES + 1.2 * min(self.logits, self.layer)
        upper += RESERVED_ERROR * self.allocated.expected
        return Bound(expected, max(upper, expected))

    @property
    def needed(self) -> float:
        """What a card must have for torch: near its end the allocator gives back what it can."""
        stepping = max(self.phases[Phase.step] - self.states.gradients, 0.0)
        if self.peak_phase is Phase.step:
            stepping = 0.0
        return self.allocated.upper + KEPT_SHARE[self.sharded] * self.activations + STEP_SHARE * stepping


def device_memory(place: Placement) -> Memory:
    """The peak of each phase of a step on one device."""
    job, states = place.job, model_states(place)
    layer = layer_activations(place)
    gathered, buffers = gathered_weights(place), communication_buffers(place)
    carried_by_one = layer.carried(job.recompute) * job.tokens
    carried = carried_by_one * job.shape.num_hidden_layers
    at_work = _backward_of_one(place, layer) * job.tokens
    held_back = _held_gradients(place, layer) * job.tokens
    lasting = job.accumulates or place.traits.zero_stage == 3  # ZeRO-3 keeps a buffer for its part of them
    waiting = states.gradients if lasting else 0.0
    head_gradient = job.shape.head_parameters * place.used_bytes if job.adapter is None else 0.0
    tied = head_gradient if job.shape.tie_word_embeddings else 0.0  # the embedding's own part comes apart
    logits, hidden = _logits(place), _last_hidden(place)
    around = gathered.root + buffers.always
    before_backward = carried + hidden + waiting + around + weight_casts(place)
    return Memory(
        states=states,
        activations=carried + at_work + held_back,
        logits=logits,
        phases={
            Phase.forward: before_backward + _tile(place, MADE_FORWARD, job.tokens),
            Phase.loss: before_backward + logits,
            Phase.first: carried
            + at_work
            + held_back
            + max(waiting, head_gradient)
            + around
            + gathered.layers
            + buffers.backward,
            Phase.last: carried_by_one
            + at_work
            + states.gradients
            + tied
            + around
            + gathered.layers
            + buffers.backward,
            Phase.step: states.gradients + buffers.always + step_copies(place),
            Phase.evaluate: around + gathered.layers + _evaluation(place, layer),
        },
        layer=at_work,
        untouched=buffers.untouched,
        sharded=place.traits.shards_weights and place.processes > 1,
    )


def _backward_of_one(place: Placement, layer: Layer) -> float:
    """Bytes for each token while one layer runs backward; recomputed, it holds all that it kept."""
    job, stack = place.job, place.job.stack
    if not job.runs_layers_twice:
        return layer.working
    brought_back = layer.input if job.recompute is Recompute.offload else 0.0
    return layer.kept + layer.working + brought_back + (layer.input if stack.recomputed_output else 0.0)


def _evaluation(place: Placement, layer: Layer) -> float:
    """A forward pass that keeps nothing: a layer at work between hidden states, and a tile of the loss."""
    job = place.job
    tile = _tile(place, MADE_FORWARD, job.eval_tokens)
    return (layer.kept + 2 * layer.input) * job.eval_tokens + tile


def _held_gradients(place: Placement, layer: Layer) -> float:
    """FSDP1 held the gradient of each frozen layer's input until the backward pass was over."""
    job = place.job
    if job.adapter is None or job.stack.fsdp == 2 or not place.traits.shards_weights:
        return 0.0
    return max(job.shape.num_hidden_layers - 2, 0) * layer.input


def _logits(place: Placement) -> float:
    """The loss, on top of the hidden states.

    TRL's fused head works on tiles, sums the head's gradient in float32, and keeps the gradient of the hidden
    states in float32 and in their own dtype.
    """
    job, shape = place.job, place.job.shape
    if job.stack.logit_bytes is not None:
        return job.stack.logit_bytes * shape.vocab_size * job.tokens
    tile = _tile(place, MADE_BACKWARD, job.tokens)
    rows = min(TILE_VOCABULARY, shape.vocab_size) * shape.hidden_size * job.compute_bytes * job.casts
    head = 4 * shape.head_parameters if job.adapter is None else 0.0
    return tile + rows + head + job.tokens * (4 * shape.hidden_size + place.hidden_bytes)


def _tile(place: Placement, made: float, tokens: int) -> float:
    """The buffer of a tile, and what torch makes of its used part where there is no kernel for it."""
    job = place.job
    if job.stack.logit_bytes is not None:
        return 0.0
    used = 0.0 if job.stack.triton else made * min(TILE_VOCABULARY, job.shape.vocab_size)
    return min(tokens, TILE_TOKENS) * (TILE_VOCABULARY * job.compute_bytes + used)


def _last_hidden(place: Placement) -> float:
    """The last hidden state, what its norm keeps, and the result."""
    job, hidden = place.job, place.hidden_bytes
    if job.stack.logit_bytes is not None:
        return (
            hidden + job.compute_bytes * job.shape.hidden_size * (1 if job.stack.fused_norm else 2)
        ) * job.tokens
    normed = hidden if job.adapter is None else 0.0
    copy = 0.0 if place.residual_bytes >= 4 else 4.0 * job.shape.hidden_size
    return (2 * hidden + normed + copy) * job.tokens
