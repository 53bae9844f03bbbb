"""Bytes that one card sends in an optimizer step, and how long they take on its link."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.config.strategy import Engine
from finetune.hardware.machine import Machine
from finetune.planner.placement import Placement

ACHIEVED = 0.75
"""Of a link's bandwidth, what collectives of large messages reach (bus bandwidth in nccl-tests)."""
STAGED = 0.5
"""Of that, what is left without peer-to-peer copies: every byte passes through host memory twice."""
OVERLAP = {Engine.none: 0.0, Engine.ddp: 0.8, Engine.fsdp2: 0.8, Engine.deepspeed: 0.6}
"""Share of the traffic that can pass while the card computes."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one card sends, in bytes for each optimizer step."""

    between_cards: float
    to_host: float
    """Over PCIe, gradients down and weights up, where states live in host memory."""


def traffic_of(place: Placement, accumulation: int) -> Traffic:
    """Collectives of each strategy, with rings: (N - 1) / N of a tensor for a gather or a scatter, twice that
    for an all-reduce (ZeRO, arXiv:1910.02054, section 7).

    FSDP and ZeRO-3 gather the weights for the forward and for the backward pass of each micro batch and
    scatter the gradients; below stage 3 the trained weights are gathered once a step.
    """
    job, traits, ring = place.job, place.traits, (place.processes - 1) / place.processes
    gradients = job.trained * place.used_bytes
    if place.processes == 1:
        between = 0.0
    elif traits.engine is Engine.ddp:
        between = 2 * ring * job.trained * job.trained_bytes
    elif traits.shards_weights:
        weights = job.frozen_weights + gradients
        gathers = 2 if place.reshards else 1
        between = ring * (gathers * weights + gradients) * accumulation
    else:
        micro = accumulation if traits.zero_stage == 2 else 1
        reduced = gradients if traits.zero_stage == 2 else 2 * gradients
        between = ring * (reduced * micro + gradients)
    host = 0.0
    if "optimizer" in traits.offloads:
        host += 2 * gradients * place.share("optimizer")
    if "weights" in traits.offloads:
        host += 2 * job.frozen_weights * place.share("weights") * accumulation
    return Traffic(between, host)


def seconds(traffic: Traffic, machine: Machine) -> float:
    """On the machine's links; between hosts all cards of one share its network."""
    rate = machine.link_bytes_s * ACHIEVED * (1.0 if machine.p2p or machine.gpu is None else STAGED)
    if machine.num_machines > 1:
        rate = min(rate, machine.network_bytes_s * ACHIEVED / max(machine.num_gpus, 1))
    pcie = 31.5e9 * ACHIEVED
    return traffic.between_cards / rate + traffic.to_host / pcie
