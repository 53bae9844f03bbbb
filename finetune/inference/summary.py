"""From what the processes of an evaluation found to its record: every figure with its interval."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from finetune.errors import RunFailed, refuse
from finetune.inference import intervals
from finetune.inference.job import NLL, RIGHT, TOKENS, answers_files, figures_file, tasks_file
from finetune.inference.metrics import ALWAYS, Metric
from finetune.inference.rows import HeldOut
from finetune.inference.subject import BASE, TUNED, Subject

SHOWN = 5
"""Answers in the record, of each model."""


def judged(folder: Path, name: str, metrics: dict[str, Metric]) -> list[dict[str, Any]]:
    """The answers in the order of their rows, each with what every metric says of it."""
    lines = [line for file in answers_files(folder, name) for line in file.open(encoding="utf-8")]
    answers = sorted((json.loads(line) for line in lines), key=lambda answer: answer["row"])
    return [answer | {"metrics": dict(_values(answer, metrics))} for answer in answers]


def _values(answer: dict[str, Any], metrics: dict[str, Metric]) -> Iterator[tuple[str, float | None]]:
    for name, metric in metrics.items():
        try:
            value = metric(answer["answer"], answer["reference"], answer["prompt"])
            yield name, None if value is None else float(value)
        except Exception as error:
            why = f"it raised {type(error).__name__} for row {answer['row']}: {error}"
            raise refuse(f"--metric {name}", why, subject="the metric") from error


def summary(
    subject: Subject,
    rows: HeldOut | None,
    max_new_tokens: int | None,
    answers: dict[str, list[dict[str, Any]]],
    metrics: dict[str, Metric],
    folder: Path,
) -> dict[str, Any]:
    """What `finetune evaluate --json` prints. `max_new_tokens`: null where nothing was answered."""
    figures = {name: _figures(folder, name) for name in subject.names} if rows is not None else {}
    models = [
        _model_record(subject, name, figures.get(name), answers[name], metrics, folder)
        for name in subject.names
    ]
    return {
        "models": models,
        "difference": _difference(figures, answers, metrics),
        "data": rows.record if rows is not None else None,
        "answered": {"max_new_tokens": max_new_tokens, "decoding": "greedy"} if max_new_tokens else None,
        "intervals": intervals.METHOD,
        "weights": subject.weights.as_record(),
    }


def _figures(folder: Path, name: str) -> np.ndarray:
    figures: np.ndarray = np.load(figures_file(folder, name), mmap_mode="r")
    unwritten = int(np.isnan(figures[:, TOKENS]).sum())
    if unwritten:
        raise RunFailed(f"{name}: no process predicted {unwritten:,} of {len(figures):,} rows.")
    return figures


def _model_record(
    subject: Subject,
    name: str,
    figures: np.ndarray | None,
    answers: list[dict[str, Any]],
    metrics: dict[str, Metric],
    folder: Path,
) -> dict[str, Any]:
    path = str(subject.tuned.folder) if name == TUNED and subject.tuned is not None else None
    record: dict[str, Any] = {"name": name, "model": path or (subject.base and subject.base.name_or_path)}
    record |= dict.fromkeys(("loss", "perplexity", "token_accuracy"))
    if figures is not None:
        loss = intervals.ratio(figures[:, NLL], figures[:, TOKENS])
        accuracy = intervals.ratio(figures[:, RIGHT], figures[:, TOKENS])
        record |= _estimate("loss", loss)
        record |= _estimate("perplexity", _exponential(loss))
        record |= _estimate("token_accuracy", accuracy)
        record |= {"supervised_tokens": int(figures[:, TOKENS].sum()), "rows": len(figures)}
    for metric in metrics:
        values = np.array([a["metrics"][metric] for a in answers if a["metrics"][metric] is not None])
        judged = _estimate(metric, intervals.worth(values)) if len(values) else {metric: None}
        if metric in ALWAYS:
            record |= judged
        else:
            record.setdefault("metrics", {})[metric] = {**judged, "rows": len(values)}
    record["answered"] = len(answers)
    record["unfinished"] = sum(not answer["finished"] for answer in answers)
    file = tasks_file(folder, name)
    if file.exists():
        record["tasks"] = json.loads(file.read_text(encoding="utf-8"))
    record["samples"] = answers[:SHOWN]
    return record


def _difference(
    figures: dict[str, np.ndarray], answers: dict[str, list[dict[str, Any]]], metrics: dict[str, Metric]
) -> dict[str, Any] | None:
    """Tuned less base, row by row: what the rows have in common drops out, so it is surer than either."""
    if set(figures) != {BASE, TUNED}:
        return None
    base, tuned = figures[BASE], figures[TUNED]
    found: dict[str, Any] = {}
    for name, column in (("loss", NLL), ("token_accuracy", RIGHT)):
        found |= _estimate(name, intervals.ratio(tuned[:, column] - base[:, column], base[:, TOKENS]))
    for metric in metrics:
        pairs = [
            (one["metrics"][metric], other["metrics"][metric])
            for one, other in zip(answers[TUNED], answers[BASE], strict=True)
        ]
        apart = np.array([a - b for a, b in pairs if a is not None and b is not None])
        if len(apart):
            found |= _estimate(metric, intervals.gain(apart))
    return found


def _estimate(name: str, estimate: intervals.Estimate) -> dict[str, Any]:
    interval = list(estimate.interval) if estimate.interval is not None else None
    return {name: estimate.value, f"{name}_interval": interval}


def _exponential(loss: intervals.Estimate) -> intervals.Estimate:
    interval = loss.interval
    return intervals.Estimate(
        _exp(loss.value), (_exp(interval[0]), _exp(interval[1])) if interval is not None else None
    )


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
