"""What a run takes outside its cards: RAM of each host, disk for checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.config.strategy import Engine
from finetune.planner.memory import Bound
from finetune.planner.placement import Placement

PROCESS_BYTES = 3e9
"""A process with torch, transformers and CUDA's libraries loaded, without any model."""
SHARD_BYTES = 5e9
"""The largest file of a checkpoint on the hub; one is read at a time."""


@dataclass(frozen=True, slots=True)
class Outside:
    """Bytes on the host."""

    memory: Bound
    """RAM of one host."""
    checkpoint: float
    """One resumable checkpoint on disk."""
    download: float
    """The model as the hub stores it, two bytes a weight."""


def outside_memory(place: Placement, per_host: int) -> Outside:
    """RAM while loading and while training, whichever is larger."""
    job, traits = place.job, place.traits
    whole = job.frozen_weights + job.trained * (job.trained_bytes if job.adapter is None else 0)
    if traits.engine is Engine.deepspeed and traits.zero_stage == 3:
        loading = whole / place.processes * per_host + SHARD_BYTES
    elif job.quantised_bytes is not None:
        loading = min(whole, SHARD_BYTES) * per_host
    else:
        loading = whole * per_host  # every process reads the whole model before it is moved or sharded
    state = job.optimizer.state_bytes(4 if traits.engine is Engine.deepspeed else job.trained_bytes)
    masters = 4 if traits.engine is Engine.deepspeed and job.compute_bytes < 4 else 0
    held = 0.0
    if "optimizer" in traits.offloads or job.optimizer.paged:
        held += job.trained * (state + masters) * place.share("optimizer") * per_host
    if "optimizer" in traits.offloads:  # gradients wait there for the optimizer, in its precision
        held += job.trained * job.trained_bytes * place.share("gradients") * per_host
    if "weights" in traits.offloads:
        held += (job.frozen_weights + job.trained * job.trained_bytes) * place.share("weights") * per_host
    checkpoint = job.trained * (job.trained_bytes + state)
    snapshot = checkpoint / place.processes * per_host
    training = PROCESS_BYTES * per_host + held
    expected = max(loading + PROCESS_BYTES * per_host, training)
    upper = max(expected, training + snapshot) * 1.1
    download = 2.0 * (job.shape.parameters + job.shape.tower_parameters)
    return Outside(Bound(expected, upper), checkpoint, download)
