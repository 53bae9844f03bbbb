"""What lies on a card beside activations: the model's states, gathered weights, buckets."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.config.strategy import Engine
from finetune.planner.placement import Placement

DEEPSPEED_BUCKET = 500_000_000
"""Entries of a bucket that gradients are reduced in below stage 3 (DeepSpeed's default); two are in use."""
LIVE_PARAMETERS = 1_000_000_000
"""Entries that ZeRO-3 keeps gathered at most (`stage3_max_live_parameters`)."""


@dataclass(frozen=True, slots=True)
class States:
    """Bytes that the field counts as the model's states; gradients live until the step ends."""

    weights: float
    gradients: float
    optimizer: float
    master_weights: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.master_weights

    @property
    def lasting(self) -> float:
        """Those that stay from step to step."""
        return self.total - self.gradients


@dataclass(frozen=True, slots=True)
class Gathered:
    """Whole weights that a sharding strategy has put together for the moment, and what else is unpacked."""

    root: float
    """Embedding and head: from the start of the forward pass to the end of the backward pass."""
    layers: float
    """The layer at work, and the next one."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """Bytes that gradients travel in."""

    always: float = 0.0
    backward: float = 0.0
    """From the first gradient to the step."""
    untouched: float = 0.0
    """Of these, what is never written to: a host gives no memory for it."""


def model_states(place: Placement) -> States:
    """Weights, gradients, optimizer states and master weights of one process.

    AdamW in mixed precision: 2 + 2 + 8 + 4 = 16 bytes for each weight (ZeRO, arXiv:1910.02054, section 3.1),
    or 4 + 4 + 8 where the weights are their own masters (autocast, FSDP2). DeepSpeed copies its masters even
    of float32 weights.
    """
    job = place.job
    deepspeed = place.traits.engine is Engine.deepspeed
    masters = 4 if deepspeed else 0
    held = job.compute_bytes if masters else job.trained_bytes
    state = job.optimizer.state_bytes(4 if deepspeed else job.trained_bytes)
    gradients = 0.0 if place.offloads("weights") else place.share("gradients")
    return States(
        weights=(job.frozen_weights + job.trained * held) * place.on_device("weights"),
        gradients=job.trained * held * gradients,
        optimizer=0.0 if job.optimizer.paged else job.trained * state * place.on_device("optimizer"),
        master_weights=job.trained * masters * place.on_device("optimizer"),
    )


def gathered_weights(place: Placement) -> Gathered:
    """FSDP holds root, the layer at work and (FSDP2) the one that is prefetched; ZeRO-3 up to its limit of
    live parameters.
    """
    job, shape, unpacked = place.job, place.job.shape, _unpacked_matrix(place)
    if not place.traits.shards_weights or place.processes == 1:
        return Gathered(0.0, unpacked)
    layer, root = shape.layer_parameters * place.used_bytes, shape.embedding_parameters * place.used_bytes
    if job.adapter is not None:
        layer = job.frozen_weights_of(
            shape.layer_parameters, job.quantised_parameters // shape.num_hidden_layers
        )
        layer += job.trained / shape.num_hidden_layers * job.trained_bytes
        root = shape.embedding_parameters * job.frozen_bytes
    if place.traits.engine is Engine.deepspeed:
        whole = layer * shape.num_hidden_layers + root
        return Gathered(whole * min(1.0, LIVE_PARAMETERS / shape.parameters), unpacked)
    return Gathered(root, layer * (1 if job.stack.fsdp == 1 else 2) + unpacked)


def _unpacked_matrix(place: Placement) -> float:
    """A quantised matrix is unpacked to be multiplied with."""
    if place.job.quantised_bytes is None:
        return 0.0
    largest = max(linear.inputs * linear.outputs for linear in place.job.shape.linears)
    return largest * place.job.compute_bytes


def communication_buffers(place: Placement) -> Buffers:
    """What gradients travel in: DDP's buckets are as large as the gradients (torch's `reducer.cpp`), FSDP2
    reduces whole layers, DeepSpeed has two buckets of a fixed size, and copies them for an optimizer that it
    offloads (from the CPU to the CPU, too).
    """
    job, traits = place.job, place.traits
    if traits.engine is Engine.deepspeed:
        copied = "optimizer" in traits.offloads and not place.offloads("optimizer")
        waiting = job.trained * 4 * place.share("optimizer") if copied else 0.0
        entries = 2 * DEEPSPEED_BUCKET if traits.zero_stage < 3 else 0
        untouched = max(entries - 2 * job.trained, 0) * job.compute_bytes
        return Buffers(waiting, backward=entries * job.compute_bytes, untouched=untouched)
    if place.processes == 1:
        return Buffers()
    if traits.engine is Engine.ddp:
        return Buffers(always=job.trained * job.trained_bytes)
    if traits.engine is Engine.fsdp2 and job.stack.fsdp == 2:
        trained = job.trained / job.shape.num_hidden_layers if job.adapter else job.shape.layer_parameters
        return Buffers(backward=2 * trained * place.used_bytes)
    return Buffers()


def weight_casts(place: Placement) -> float:
    """Autocast's copies of the trained matrices live until the forward pass ends."""
    job = place.job
    if job.adapter is not None or place.casts_weights or not job.casts:
        return 0.0
    return job.shape.linear_parameters * job.compute_bytes


def step_copies(place: Placement) -> float:
    """What lives while the optimizer steps: an update of all weights, DeepSpeed's gradients in float32."""
    job, part = place.job, place.on_device("optimizer")
    copies = job.trained * job.optimizer.step_copies * job.trained_bytes
    if place.traits.engine is Engine.deepspeed and job.compute_bytes < 4:
        copies += job.trained * 4
    return copies * part
