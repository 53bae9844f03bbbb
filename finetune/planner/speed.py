"""How long an optimizer step takes: arithmetic, traffic, and the optimizer's own pass over its states."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from finetune.hardware.machine import Machine
from finetune.planner.job import Job
from finetune.planner.placement import Placement
from finetune.planner.traffic import OVERLAP, Traffic, seconds, traffic_of

ACHIEVED_FLOPS = {0: 0.5, 7: 0.4, 8: 0.55, 9: 0.4, 10: 0.35, 12: 0.5}
"""Share of the card's rate for matrix products that training reaches, by major compute capability: published
runs of 1 to 8 cards lie between 0.50 and 0.68 on Ampere and Ada, 0.28 and 0.42 on Hopper, where everything
around the products takes the larger part."""
OPERATIONS, ADAPTER_OPERATIONS, LAUNCH_SECONDS = 100, 80, 8e-6
"""Kernels of a layer in a forward and a backward pass, those of its adapters, and the time that Python and
torch take to start one: a card waits for them, however little there is to compute."""
UNPACKING = 0.5
"""Of a card's bandwidth, what unpacking 4-bit weights reaches."""
WAITING = 0.055
"""Of a step, for each doubling of the cards: rows differ in length, NCCL's kernels take part of a card."""
CPU_ADAM_BYTES_S = 20e9
"""Host memory that an optimizer on the CPU reads and writes each second."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step."""

    compute: float
    traffic: float
    optimizer: float
    total: float


def step_time(place: Placement, machine: Machine, accumulation: int) -> StepTime:
    """The forecast: traffic hides behind arithmetic as far as the strategy lets it."""
    job = place.job
    tokens = job.tokens * accumulation
    share = ACHIEVED_FLOPS.get(int(machine.capability), 0.4)
    precision = 1.0 if job.compute_bytes == 2 or machine.gpu is None else 8.0
    shared = 1.0 if machine.gpu else place.processes / machine.num_machines  # processes of one CPU
    needed = tokens * flops_per_token(job, run_twice=job.runs_layers_twice)
    compute = needed * precision * shared / (machine.flops * share)
    if machine.gpu is not None:
        compute = max(compute, launch_seconds(place) * accumulation)
        compute += unpacking_seconds(place, machine) * accumulation
    sent = traffic_of(place, accumulation)
    moved = seconds(sent, machine)
    hidden = min(moved * OVERLAP[place.traits.engine], compute)
    hidden = hidden if not sent.to_host else min(hidden, seconds(Traffic(sent.between_cards, 0.0), machine))
    optimizer = optimizer_seconds(place, machine)
    waiting = 1 + WAITING * log2(place.processes)
    return StepTime(compute, moved, optimizer, (compute + moved - hidden) * waiting + optimizer)


def unpacking_seconds(place: Placement, machine: Machine) -> float:
    """Of one micro batch: a quantised weight is read, written and read again in each pass over the layers."""
    job = place.job
    if job.quantised_bytes is None:
        return 0.0
    passes = 3 if job.runs_layers_twice else 2
    moved = job.quantised_parameters * (job.quantised_bytes + 2 * job.compute_bytes)
    return passes * moved / (machine.memory_bytes_s * UNPACKING)


def launch_seconds(place: Placement) -> float:
    """Of one micro batch; layers that are run twice are started twice."""
    job = place.job
    operations = OPERATIONS + (ADAPTER_OPERATIONS if job.adapter is not None else 0)
    again = 4 / 3 if job.runs_layers_twice else 1
    return operations * again * job.shape.num_hidden_layers * LAUNCH_SECONDS


def flops_per_token(job: Job, *, run_twice: bool = False) -> float:
    """2 for each active weight in the forward pass, 4 backward (2 where weights are frozen), 2 again when the
    layers are run twice (arXiv:2001.08361, section 2.1); attention adds its products with half the row.
    """
    passes = 2 + (4 if job.adapter is None else 2)
    passes += 2 if run_twice else 0
    seen = min(job.row_tokens, job.shape.sliding_window or job.row_tokens) / 2
    weights = passes * job.shape.active_parameters + 6 * (job.trained if job.adapter else 0)
    return weights + seen * flops_per_position(job, run_twice=run_twice)


def flops_per_position(job: Job, *, run_twice: bool = False) -> float:
    """Of attention, for each position that a token looks at."""
    products = 2 * 2 * job.shape.query_size * job.shape.num_hidden_layers
    return (4 if run_twice else 3) * products


def optimizer_seconds(place: Placement, machine: Machine) -> float:
    """It reads and writes weights, gradients and states once: a matter of memory bandwidth."""
    job = place.job
    touched = job.trained * (3 * job.trained_bytes + 2 * job.optimizer.state_bytes(job.trained_bytes))
    touched *= place.share("optimizer")
    on_host = "optimizer" in place.traits.offloads
    return touched / (CPU_ADAM_BYTES_S if on_host else machine.memory_bytes_s)
