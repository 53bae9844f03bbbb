"""What did a run come to? Its figures by name, for the page, for scripts, and beside another run's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.report.cost import Cost, cost_of
from finetune.report.memory import Memory, memory_of
from finetune.report.metrics import Metrics, number, number_or, usual_speed
from finetune.report.reading import Reading, at
from finetune.report.times import Start


def record_of(reading: Reading) -> dict[str, Any]:
    """One run for scripts: results, costs, curves as logged, and what was missing."""
    cost = cost_of(reading)
    return {
        "run_dir": str(reading.run_dir.path),
        "status": reading.status,
        "results": results_of(reading, cost, memory_of(reading)),
        "cost": cost.as_record(),
        "curves": {name: curve.thinned().as_record() for name, curve in reading.metrics.curves.items()},
        "missing": reading.missing,
    }


def results_of(reading: Reading, cost: Cost, memory: Memory) -> dict[str, Any]:
    """Figures unrounded; None: the folder does not tell."""
    report, metrics, config = reading.report, reading.metrics, reading.config
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
        "step_seconds": number_or(
            at(report, "forecast", "step_seconds", "measured"), _logged_step_seconds(metrics, speed)
        ),
        "peak_memory_bytes": memory.most,
        "planned_memory_bytes": memory.planned.get("upper"),
        "training_seconds": cost.training_seconds,
        "seconds": cost.seconds,
        "device_hours": cost.device_hours,
        "cost": cost.money,
        "currency": cost.currency,
    }


def _model(config: dict[str, Any]) -> str | None:
    name = at(config, "model", "name_or_path")
    return Path(name).name if isinstance(name, str) and name.startswith("/") else name


def _logged_step_seconds(metrics: Metrics, speed: float | None) -> float | None:
    """As the run reports it at its end."""
    return metrics.step_tokens / speed if speed and metrics.step_tokens else None


def _logged_speed(metrics: Metrics, starts: list[Start]) -> float | None:
    """As the run reports it at its end."""
    curve = metrics.curves.get("tokens_per_second")
    return None if curve is None else usual_speed(dict(zip(curve.steps, curve.values, strict=True)), starts)
