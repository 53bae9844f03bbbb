"""How long an optimizer step takes: arithmetic, traffic, and the optimizer's own pass over its states."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.hardware.machine import Machine
from finetune.planner.placement import Placement
from finetune.planner.stack import Recompute
from finetune.planner.traffic import OVERLAP, Traffic, seconds, traffic_of

ACHIEVED_FLOPS = {0: 0.5, 7: 0.4, 8: 0.55, 9: 0.4, 10: 0.35, 12: 0.5}
"""Share of the card's rate for matrix products that training reaches, by major compute capability: published
runs of 1 to 8 cards lie between 0.50 and 0.68 on Ampere and Ada, 0.28 and 0.42 on Hopper, where everything
around the products takes the larger part."""
SMALL_MODEL = 1.5e9
"""Parameters below which kernels are too short to keep a card busy."""
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
    active = job.shape.active_parameters
    busy = share * min(1.0, (0.4 + 0.6 * active / SMALL_MODEL)) if machine.gpu else share
    precision = 1.0 if job.compute_bytes == 2 or machine.gpu is None else 8.0
    compute = tokens * flops_per_token(place) * precision / (machine.flops * busy)
    sent = traffic_of(place, accumulation)
    moved = seconds(sent, machine)
    hidden = min(moved * OVERLAP[place.traits.engine], compute)
    hidden = hidden if not sent.to_host else min(hidden, seconds(Traffic(sent.between_cards, 0.0), machine))
    optimizer = optimizer_seconds(place, machine)
    return StepTime(compute, moved, optimizer, compute + moved - hidden + optimizer)


def flops_per_token(place: Placement) -> float:
    """2 for each active weight in the forward pass, 4 backward (2 where weights are frozen), 2 again when the
    layers are run twice (arXiv:2001.08361, section 2.1); attention adds its products with half the row.
    """
    job, shape = place.job, place.job.shape
    passes = 2 + (4 if job.adapter is None else 2)
    passes += 2 if job.recompute in (Recompute.full, Recompute.offload) else 0
    seen = min(job.row_tokens, shape.sliding_window or job.row_tokens) / 2
    attention = 2 * 2 * shape.query_size * seen * shape.num_hidden_layers
    again = 4 if job.recompute in (Recompute.full, Recompute.offload) else 3
    return passes * shape.active_parameters + again * attention + 6 * (job.trained if job.adapter else 0)


def optimizer_seconds(place: Placement, machine: Machine) -> float:
    """It reads and writes weights, gradients and states once: a matter of memory bandwidth."""
    job = place.job
    touched = job.trained * (3 * job.trained_bytes + 2 * job.optimizer.state_bytes(job.trained_bytes))
    touched *= place.share("optimizer")
    on_host = "optimizer" in place.traits.offloads
    return touched / (CPU_ADAM_BYTES_S if on_host else machine.memory_bytes_s)
