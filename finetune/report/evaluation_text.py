"""An evaluation on a terminal: base against tuned in one table, and answers side by side."""

from __future__ import annotations

import textwrap
from typing import Any

SHOWN_SAMPLES = 3
LONGEST_SAMPLE = 400
NARROWEST = 28
"""Characters of a column in which an answer can still be read."""

LABEL = 13
"""Characters before a text that hangs under its name."""

FIGURES = {
    "loss": "loss",
    "perplexity": "perplexity",
    "token_accuracy": "token accuracy",
    "exact_match": "exact match",
    "normalized_match": "normalized match",
}


def evaluation_lines(record: dict[str, Any], columns: int = 100) -> list[str]:
    """The table, what its intervals mean, and a few answers."""
    models, table = record["models"], evaluation_table(record)
    lines = ["", *_aligned(table), "", *notes_of(record)]
    return [*lines, *task_lines(models), *_samples(models, columns)]


def evaluation_table(record: dict[str, Any]) -> list[list[str]]:
    """A row for each figure, the names of the models in the first; all as they are shown."""
    models, difference = record["models"], record["difference"]
    heads = ["", *(model["name"] for model in models), *(["tuned - base"] if difference else [])]
    table = [heads]
    for name, title in _titles(models).items():
        cells = [_cell(_find(model, name), _find(model, f"{name}_interval"), name) for model in models]
        if any(cells):
            apart = difference or {}
            last = _cell(apart.get(name), apart.get(f"{name}_interval"), name, "+")
            table.append([title, *(cell or "-" for cell in cells), last])
    table += [[title, *cells] for title, cells in _counts(models)]
    return table


def notes_of(record: dict[str, Any]) -> list[str]:
    """What the intervals mean, and which answers were cut off."""
    models = record["models"]
    lines = []
    if len(evaluation_table(record)) > 1:
        lines.append(f"In brackets: the interval, {record['intervals']}.")
    unfinished = [f"{model['unfinished']} of {model['name']}" for model in models if model["unfinished"]]
    if unfinished:
        length = record["answered"]["max_new_tokens"]
        lines.append(f"Answers cut off after {length} tokens: {', '.join(unfinished)} (--max-new-tokens).")
    return lines


def task_lines(models: list[dict[str, Any]]) -> list[str]:
    """The harness's own figures, with its standard errors."""
    asked = [model for model in models if "tasks" in model]
    if not asked:
        return []
    table = [["task", "metric", *(model["name"] for model in asked)]]
    for task, figures in asked[0]["tasks"].items():
        for metric in figures:
            cells = [_task_cell(model["tasks"].get(task, {}).get(metric)) for model in asked]
            table.append([task, metric, *cells])
    return ["", *_aligned(table), "Tasks: lm-evaluation-harness, with its standard errors; no chat template."]


def side_by_side(said: dict[str, str], columns: int) -> list[str]:
    """Texts under their names: beside each other where there is room, else one below the other."""
    width = (columns - 3 * (len(said) - 1)) // max(len(said), 1)
    if len(said) < 2 or width < NARROWEST:
        return [line for name, text in said.items() for line in _hanging(name, text, columns)]
    parts = [[name, "-" * min(width, len(name)), *_wrapped(text, width)] for name, text in said.items()]
    height = max(map(len, parts))
    filled = [part + [""] * (height - len(part)) for part in parts]
    return [" | ".join(f"{cell:<{width}}" for cell in row).rstrip() for row in zip(*filled, strict=True)]


def _hanging(name: str, text: str, columns: int) -> list[str]:
    first, *others = _wrapped(text, columns - LABEL)
    return [f"  {name:<{LABEL - 2}}{first}", *(" " * LABEL + line for line in others)]


def _titles(models: list[dict[str, Any]]) -> dict[str, str]:
    own = [name for model in models for name in model.get("metrics", {})]
    return {**FIGURES, **{name: name.replace("_", " ") for name in own}}


def _find(model: dict[str, Any], name: str) -> Any:
    """A figure of the model, or of one of its further metrics."""
    for figures in model.get("metrics", {}).values():
        if name in figures:
            return figures[name]
    return model.get(name)


def _cell(value: float | None, interval: list[float] | None, name: str, sign: str = "") -> str:
    if value is None:
        return ""
    form = f"{sign}.3f" if name == "perplexity" else f"{sign}.4f"
    if interval is None:
        return f"{value:{form}}"
    return f"{value:{form}} [{interval[0]:{form}}, {interval[1]:{form}}]"


def _counts(models: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    names = {"rows": "rows", "supervised_tokens": "supervised tokens", "answered": "rows answered"}
    return [
        (title, [f"{model[name]:,}" for model in models])
        for name, title in names.items()
        if all(model.get(name) for model in models)
    ]


def _aligned(table: list[list[str]]) -> list[str]:
    wide = max(map(len, table))
    rows = [row + [""] * (wide - len(row)) for row in table]
    widths = [max(len(row[column]) for row in rows) for column in range(wide)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _task_cell(figure: dict[str, Any] | None) -> str:
    if figure is None:
        return "-"
    error = f" +- {figure['stderr']:.4f}" if figure["stderr"] is not None else ""
    return f"{figure['value']:.4f}{error}"


def _samples(models: list[dict[str, Any]], columns: int) -> list[str]:
    lines: list[str] = []
    for place, first in enumerate(models[0]["samples"][:SHOWN_SAMPLES]):
        answers = {model["name"]: _short(model["samples"][place]["answer"]) for model in models}
        lines += ["", f"row {first['row']:,}: {_short(first['prompt'])}"]
        lines += side_by_side({"reference": _short(first["reference"]), **answers}, columns)
    return lines


def _short(text: str) -> str:
    """On a terminal; what would move its cursor is shown as a code."""
    text = printable(text)
    return text if len(text) <= LONGEST_SAMPLE else f"{text[:LONGEST_SAMPLE]} [...]"


def printable(text: str) -> str:
    """Without what would move a terminal's cursor or change its colours."""
    return "".join(c if c == "\n" or c.isprintable() else f"\\x{ord(c):02x}" for c in text.expandtabs(4))


def _wrapped(text: str, width: int) -> list[str]:
    return [part for line in text.splitlines() for part in textwrap.wrap(line, width) or [""]] or [
        "(nothing)"
    ]
