"""What a run takes outside its cards: RAM of each host, disk for checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.config.strategy import Engine
from finetune.planner.memory import Bound, Memory, Phase
from finetune.planner.placement import Placement

PROCESS_BYTES = {"cpu": 0.6e9, "cuda": 3e9}
"""A process with torch, transformers and, with a card, CUDA's libraries loaded, without any model."""
PROCESS_SPREAD = 0.1e9
"""On the CPU runs differ by what they use of the libraries: 0.56 to 0.70 GB with a tiny model."""
SHARD_BYTES = 5e9
"""The largest file of a checkpoint on the hub; one is read at a time."""

HOST_ERROR = 1.1
"""RAM that is held without being used. A checkpoint's copy is not among it: where there is no room for one,
training waits for the disk.
"""


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
    """RAM while loading and while training, whichever is larger; on the CPU without what computes there."""
    libraries = PROCESS_BYTES[place.device] * per_host
    job, traits = place.job, place.traits
    whole = job.frozen_weights + job.trained * (job.trained_bytes if job.adapter is None else 0)
    if traits.engine is Engine.deepspeed and traits.zero_stage == 3:
        loading = whole / place.processes * per_host + min(whole, SHARD_BYTES)
    elif job.quantised_bytes is not None:
        loading = min(whole, SHARD_BYTES) * per_host
    else:
        loading = whole * per_host  # every process reads the whole model before it is moved or sharded
    state = job.optimizer.state_bytes(4 if traits.engine is Engine.deepspeed else job.trained_bytes)
    masters = 4 if traits.engine is Engine.deepspeed else 0
    held = 0.0
    if place.offloads("optimizer") or job.optimizer.paged:
        held += job.trained * (state + masters) * place.share("optimizer") * per_host
    if place.offloads("optimizer"):  # gradients wait there for the optimizer, in its precision
        held += job.trained * job.trained_bytes * place.share("gradients") * per_host
    if place.offloads("weights"):
        held += (job.frozen_weights + job.trained * job.trained_bytes) * place.share("weights") * per_host
    checkpoint = job.trained * (job.trained_bytes + state)
    training = libraries + held
    expected = max(loading + libraries, training)
    upper = expected * HOST_ERROR
    download = 2.0 * (job.shape.parameters + job.shape.tower_parameters)
    return Outside(Bound(expected, upper), checkpoint, download)


def resident_memory(memory: Memory) -> Bound:
    """RAM of a process that computes on the CPU."""
    backward = (Phase.first, Phase.last)
    peak = max(size - (memory.untouched if phase in backward else 0) for phase, size in memory.phases.items())
    expected = PROCESS_BYTES["cpu"] + memory.states.lasting + peak
    upper = HOST_ERROR * expected + PROCESS_SPREAD + memory.needed - memory.allocated.expected
    return Bound(expected, upper)
