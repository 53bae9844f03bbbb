"""What did a run come to? Its figures by name, for the page, for scripts, and beside another run's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.report.cost import Cost, cost_of
from finetune.report.metrics import Metrics, most_memory, number, number_or, usual_speed
from finetune.report.reading import Reading, at
from finetune.report.times import Start


def record_of(reading: Reading) -> dict[str, Any]:
    """One run for scripts: results, costs, curves as logged, and what was missing."""
    cost = cost_of(reading)
    return {
        "run_dir": str(reading.run_dir.path),
        "status": reading.status,
        "results": results_of(reading, cost),
        "cost": cost.as_record(),
        "curves": {name: curve.thinned().as_record() for name, curve in reading.metrics.curves.items()},
        "missing": reading.missing,
    }


def results_of(reading: Reading, cost: Cost) -> dict[str, Any]:
    """Figures unrounded; None: the folder does not tell."""
    report, metrics, config = reading.report, reading.metrics, reading.config
    measured = measured_memory(reading)
    steps = number(at(report, "steps"))
    speed = number_or(at(report, "tokens_per_second"), _logged_speed(metrics, reading.starts))
    return {
        "status": reading.status,
        "model": _model(config),
        "method": at(config, "adapter", "method"),
        "strategy": reading.strategy,
        "num_processes": reading.processes,
        "precision": at(report, "precision") or reading.facts.get("precision"),
        "global_batch_size": number(at(report, "batch", "global")),
        "steps": metrics.last_step if steps is None else steps,
        "supervised_tokens": number_or(at(report, "supervised_tokens"), metrics.supervised_tokens),
        "first_loss": number_or(at(report, "loss", "first"), metrics.first("loss")),
        "final_loss": number_or(at(report, "loss", "last"), metrics.last("loss")),
        "eval_loss": number_or(at(report, "eval_loss"), metrics.last("eval_loss")),
        "tokens_per_second": speed,
        "step_seconds": metrics.step_tokens / speed
        if speed and metrics.step_tokens
        else number(at(report, "forecast", "step_seconds", "measured")),
        "peak_memory_bytes": max(measured.values(), default=None),
        "planned_memory_bytes": planned_memory(reading).get("upper"),
        "training_seconds": cost.training_seconds,
        "seconds": cost.seconds,
        "device_hours": cost.device_hours,
        "cost": cost.money,
        "currency": cost.currency,
    }


def measured_memory(reading: Reading) -> dict[int, float]:
    """The most memory of each rank over all starts, of the kind that the plan speaks of first: as the run
    reports it, and as it logged it.
    """
    ranks = at(reading.report, "memory", "measured_bytes")
    kind = memory_kind(reading)
    sizes = [number(at(own, kind)) for own in ranks] if isinstance(ranks, list) else []
    reported = [{} if size is None else {kind: size} for size in sizes]
    most = most_memory(reported, {kind: reading.metrics.memory.get(kind, [])})
    return {rank: own[kind] for rank, own in enumerate(most) if own.get(kind)}


def planned_memory(reading: Reading) -> dict[str, float]:
    """`expected` and `upper` of one process."""
    kind = memory_kind(reading)
    for planned in (
        at(reading.report, "memory", "planned_bytes"),
        at(reading.plan, "forecast", "memory"),
    ):
        found = {name: number(at(planned, kind, name)) for name in ("expected", "upper")}
        if None not in found.values():
            return {name: size for name, size in found.items() if size is not None}
    return {}


def memory_kind(reading: Reading) -> str:
    """`allocated` on cards, `resident` on the CPU; what was planned has the same names."""
    ranks = at(reading.report, "memory", "measured_bytes")
    measured = ranks[0] if isinstance(ranks, list) and ranks else None
    planned = at(reading.report, "memory", "planned_bytes") or at(reading.plan, "forecast", "memory")
    kinds = measured or planned or reading.metrics.memory
    return next(iter(kinds), "allocated") if isinstance(kinds, dict) else "allocated"


def _model(config: dict[str, Any]) -> str | None:
    name = at(config, "model", "name_or_path")
    return Path(name).name if isinstance(name, str) and name.startswith("/") else name


def _logged_speed(metrics: Metrics, starts: list[Start]) -> float | None:
    """As the run reports it at its end."""
    curve = metrics.curves.get("tokens_per_second")
    return None if curve is None else usual_speed(dict(zip(curve.steps, curve.values, strict=True)), starts)
