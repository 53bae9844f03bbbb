"""What did a run come to? Its figures by name, for the page, for scripts, and beside another run's."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from finetune.report.cost import Cost, cost_of
from finetune.report.metrics import Curve, number
from finetune.report.reading import Reading, at


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
    return {
        "status": reading.status,
        "model": _model(config),
        "method": at(config, "adapter", "method"),
        "strategy": reading.strategy,
        "num_processes": reading.processes,
        "precision": at(report, "precision") or reading.facts.get("precision"),
        "global_batch_size": number(at(report, "batch", "global")),
        "steps": metrics.last_step if steps is None else steps,
        "supervised_tokens": number(at(report, "supervised_tokens")),
        "first_loss": _known(at(report, "loss", "first"), metrics.first("loss")),
        "final_loss": _known(at(report, "loss", "last"), metrics.last("loss")),
        "eval_loss": _known(at(report, "eval_loss"), metrics.last("eval_loss")),
        "tokens_per_second": _known(
            at(report, "tokens_per_second"), _usual_speed(metrics.curves.get("tokens_per_second"))
        ),
        "peak_memory_bytes": max(measured.values(), default=None),
        "planned_memory_bytes": planned_memory(reading).get("upper"),
        "training_seconds": cost.training_seconds,
        "seconds": cost.seconds,
        "device_hours": cost.device_hours,
        "cost": cost.money,
        "currency": cost.currency,
    }


def measured_memory(reading: Reading) -> dict[int, float]:
    """The most memory of each rank, of the kind that the plan speaks of first."""
    ranks = at(reading.report, "memory", "measured_bytes")
    kind = memory_kind(reading)
    sizes = {rank: number(at(own, kind)) for rank, own in enumerate(ranks if isinstance(ranks, list) else [])}
    return {rank: size for rank, size in sizes.items() if size is not None}


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
    kinds = measured or at(reading.plan, "forecast", "memory")
    return next(iter(kinds), "allocated") if isinstance(kinds, dict) else "allocated"


def _model(config: dict[str, Any]) -> str | None:
    name = at(config, "model", "name_or_path")
    return Path(name).name if isinstance(name, str) and name.startswith("/") else name


def _known(reported: Any, logged: float | None) -> float | None:
    found = number(reported)
    return logged if found is None else found


def _usual_speed(curve: Curve | None) -> float | None:
    """As the run reports it at its end: the first step pays for warm-up."""
    return None if curve is None else median(curve.values[1:] or curve.values)
