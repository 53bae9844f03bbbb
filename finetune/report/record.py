"""`report.json`: what was asked, what ran, what came out, and what was checked on the saved model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from finetune.paths import RunDir, write_whole
from finetune.report.metrics import usual_speed
from finetune.report.page import page_at_end
from finetune.report.times import Start, note_end
from finetune.secrets import masked


@dataclass(slots=True)
class Report:
    """The report of one run, filled as the run goes; written whole each time."""

    run_dir: RunDir
    content: dict[str, Any] = field(default_factory=dict)

    def update(self, **values: Any) -> None:
        self.content |= values

    def write(self) -> None:
        write_whole(self.run_dir.report, json.dumps(_errors_masked(self.content), indent=2) + "\n")


def _errors_masked(value: Any) -> Any:
    """What libraries say of a failure may hold a secret, and a report goes off the machine."""
    if not isinstance(value, dict):
        return value
    return {
        name: masked(inner) if name == "error" and isinstance(inner, str) else _errors_masked(inner)
        for name, inner in value.items()
    }


def read_report(run_dir: RunDir) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(run_dir.report.read_text(encoding="utf-8"))
    return content


def read_samples(run_dir: RunDir) -> list[dict[str, Any]]:
    """The first training rows as data.json shows them: `text` and the parts of it that are learnt."""
    content = json.loads(run_dir.data.read_text(encoding="utf-8")) if run_dir.data.exists() else {}
    samples: list[dict[str, Any]] = (content.get("train") or {}).get("samples", [])
    return samples


def planned_forecast(run_dir: RunDir) -> dict[str, Any] | None:
    """What the chosen strategy was forecast to take; None where nothing was planned."""
    if not run_dir.plan.exists():
        return None
    forecast: dict[str, Any] = json.loads(run_dir.plan.read_text(encoding="utf-8"))["forecast"]
    return forecast


def last_step(run_dir: RunDir) -> dict[str, Any]:
    """The last step that was logged; empty before the first one."""
    lines = run_dir.metrics.read_text(encoding="utf-8").splitlines() if run_dir.metrics.exists() else []
    steps = (json.loads(line) for line in reversed(lines) if '"loss"' in line and line.endswith("}"))
    return next(steps, {})


def report_end(run_dir: RunDir, status: str, told: str) -> None:
    """Mark a run as `failed` or `interrupted`, keeping what is known of it."""
    note_end(run_dir)
    known = read_report(run_dir) if run_dir.report.exists() else {}
    Report(run_dir, {**known, "status": status, "error": told}).write()


def report_diagnosis(run_dir: RunDir, diagnosis: dict[str, Any] | None, say: Callable[[str], None]) -> None:
    """Add the known cause of a failure (null: none is known), which is the last that is said, and make the
    page.
    """
    known = read_report(run_dir) if run_dir.report.exists() else {}
    Report(run_dir, {**known, "diagnosis": diagnosis}).write()
    page_at_end(run_dir, say)


def summary(history: list[dict[str, Any]], steps_made: int, starts: list[Start]) -> dict[str, Any]:
    """Loss, speed and tokens from the logged steps of all starts.

    `tokens_per_second` is the median of those steps; the first of each start is left out (it pays for
    warm-up), unless there is no other.
    """
    steps = [entry for entry in history if "loss" in entry]
    evaluations = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    speeds = {entry["step"]: entry["tokens_per_second"] for entry in steps if "tokens_per_second" in entry}
    result: dict[str, Any] = {
        "steps": steps_made,
        "loss": {"first": steps[0]["loss"], "last": steps[-1]["loss"]} if steps else None,
        "tokens_per_second": usual_speed(speeds, starts),
        "supervised_tokens": steps[-1]["supervised_tokens"] if steps else 0,
    }
    return result | ({"eval_loss": evaluations[-1]} if evaluations else {})
