"""What a run is forecast to take, in the terms that it measures itself in; and the two side by side."""

from __future__ import annotations

from typing import Any

from finetune.config.strategy import TRAITS, Engine
from finetune.hardware.machine import UNKNOWN, Machine
from finetune.planner.host import PROCESS_BYTES, resident_memory
from finetune.planner.memory import Phase
from finetune.planner.option import Option

LOADING, BETWEEN, FORWARD, BACKWARD, STEP = "loading", "between", "forward", "backward", "step"
"""Phases that a run tells apart; `between` steps it evaluates and saves, which is not forecast."""


def forecast_of(option: Option, machine: Machine) -> dict[str, Any]:
    """Bytes of one process, seconds of a step: what plan.json keeps to compare with."""
    memory, tensors = option.memory, _tensors(option, 0.0)
    kinds, phases = {"allocated": memory.allocated, "reserved": memory.reserved}, tensors
    if option.facts.device == "cpu":
        kinds = {"resident": resident_memory(memory)}
        touched = _tensors(option, memory.untouched)
        phases = {name: round(PROCESS_BYTES["cpu"]) + size for name, size in touched.items()}
    return {
        "memory": {
            kind: {"expected": round(bound.expected), "upper": round(bound.upper)}
            for kind, bound in kinds.items()
        },
        "phases": phases,
        "tensors": tensors,
        "micro_batch_tokens": option.micro_batch_tokens,
        "step_seconds": option.time.total,
        "tokens_per_second": option.tokens_per_second,
        "flops": {**option.flops, "peak": _peak_flops(option, machine)},
    }


def _peak_flops(option: Option, machine: Machine) -> float | None:
    """Of one card in 16 bits; None: its data sheet is not known, or the run computes in others."""
    known = machine.gpu is not None and machine.gpu != UNKNOWN.gpu
    return machine.flops if known and option.facts.precision in ("bf16", "fp16") else None


def _tensors(option: Option, untouched: float) -> dict[str, int]:
    """The peak of each phase that a run tells apart, without what is `untouched` in the backward pass."""
    of, lasting = option.memory.phases, option.memory.states.lasting
    backward = max(of[Phase.loss], of[Phase.first] - untouched, of[Phase.last] - untouched)
    peaks = {FORWARD: of[Phase.forward], BACKWARD: backward, STEP: of[Phase.step]}
    if TRAITS[option.strategy].engine is Engine.deepspeed:  # its engine steps inside the backward pass
        peaks[BACKWARD] = max(peaks[BACKWARD], peaks.pop(STEP))
    return {name: round(lasting + size) for name, size in peaks.items()}


def compared(
    forecast: dict[str, Any] | None,
    phases: list[dict[str, dict[str, int]]],
    micro_batch_tokens: int,
    step_seconds: float | None,
    tokens_per_second: float | None,
) -> dict[str, Any] | None:
    """Planned and measured side by side; `phases` holds one entry for each process. None: nothing was
    planned.

    A forecast takes every row to be as long as it may be: `micro_batch_tokens` tells how long they were.
    `step_seconds` is a step of as many tokens as the run's steps had in the mean, at `tokens_per_second`.
    """
    if forecast is None:
        return None
    kind = next(iter(forecast["memory"]))
    measured = {
        name: max(own.get(name, {}).get(kind, 0) for own in phases)
        for name in (LOADING, FORWARD, BACKWARD, STEP, BETWEEN)
    }
    return {
        "memory": {
            "of": kind,
            "phases": {
                name: {"planned": forecast["phases"].get(name), "measured": size}
                for name, size in measured.items()
            },
        },
        "micro_batch_tokens": {"planned": forecast["micro_batch_tokens"], "measured": micro_batch_tokens},
        "step_seconds": {"planned": forecast["step_seconds"], "measured": step_seconds},
        "tokens_per_second": {"planned": forecast["tokens_per_second"], "measured": tokens_per_second},
    }


def compared_line(comparison: dict[str, Any]) -> str:
    """What the terminal shows of it: the highest phase, and the step."""
    phases = [phase for phase in comparison["memory"]["phases"].values() if phase["planned"] is not None]
    planned, measured = (max(phase[name] for phase in phases) / 1e9 for name in ("planned", "measured"))
    line = f"{planned:,.2f} GB {comparison['memory']['of']}, measured {measured:,.2f}"
    step, tokens = comparison["step_seconds"], comparison["micro_batch_tokens"]
    if step["measured"] is not None:
        line += f"; {step['planned']:,.2f} s a step, measured {step['measured']:,.2f}"
    return f"{line} (for {tokens['planned']:,} tokens at once, it had up to {tokens['measured']:,})"
