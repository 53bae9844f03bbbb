"""A plan as JSON: what scripts read, and what a run keeps as plan.json."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from finetune.config.schema import RunConfig
from finetune.planner.duration import duration_of
from finetune.planner.forecast import forecast_of
from finetune.planner.option import Option
from finetune.planner.plan import Plan


def as_record(plan: Plan, config: RunConfig) -> dict[str, Any]:
    """Sizes in bytes, times in seconds."""
    chosen, machine = plan.chosen, plan.machine
    batch = {
        **asdict(chosen.facts.batch),
        "global": chosen.facts.batch.global_size,
        "tokens_per_step": int(chosen.tokens_per_step),
        "activation_checkpointing": bool(chosen.config.trainer.activation_checkpointing),
        "steps": duration_of(chosen, config, machine).steps,
    }
    refused = [
        {"strategy": strategy.value, "fits": False, "refused": why} for strategy, why in plan.refused.items()
    ]
    return {
        "chosen": chosen.strategy.value,
        "fits": plan.fits,
        "why": plan.why,
        "hardware": {
            "name": machine.label,
            "gpu": machine.gpu,
            "num_gpus": machine.num_gpus,
            "num_machines": machine.num_machines,
            "memory_bytes": machine.total_bytes,
            "usable_bytes": machine.usable_bytes,
            "host_bytes": machine.host_bytes,
            "link": machine.link,
            "link_bytes_per_second": machine.link_bytes_s,
            "p2p": machine.p2p,
            "price_per_hour": machine.price_per_hour,
            "currency": machine.currency,
        },
        "batch": batch,
        "strategies": [*(_option(option, plan, config) for option in plan.options), *refused],
        "forecast": forecast_of(chosen, machine),
        "advice": list(plan.advice),
        "notes": list(plan.notes),
    }


def _option(option: Option, plan: Plan, config: RunConfig) -> dict[str, Any]:
    memory, outside, time, traffic = option.memory, option.outside, option.time, option.traffic
    states, duration = memory.states, duration_of(option, config, plan.machine)
    return {
        "strategy": option.strategy.value,
        "fits": option.fits,
        "num_processes": option.facts.num_processes,
        "gpu": {
            "weights": round(states.weights),
            "gradients": round(states.gradients),
            "optimizer": round(states.optimizer),
            "master_weights": round(states.master_weights),
            "activations": round(memory.activations),
            "logits": round(memory.logits),
            "other": round(memory.other),
            "peak_allocated": _bound(memory.allocated),
            "peak_reserved": _bound(memory.reserved),
            "peak_phase": memory.peak_phase.value,
            "needed": round(option.card_bytes),
        },
        "host": _bound(option.host),
        "checkpoint_bytes": round(outside.checkpoint),
        "disk_bytes": round(outside.checkpoint * (config.checkpoint.keep + 1)),
        "traffic_bytes_per_step": round(traffic.between_cards),
        "host_traffic_bytes_per_step": round(traffic.to_host),
        "step_seconds": time.total,
        "compute_seconds": time.compute,
        "traffic_seconds": time.traffic,
        "tokens_per_second": option.tokens_per_second,
        "seconds": duration.seconds,
        "cost": duration.cost,
        "assumption": duration.assumption,
    }


def _bound(bound: Any) -> dict[str, int]:
    return {"expected": round(bound.expected), "upper": round(bound.upper)}
