"""What does a notebook show below a cell: of a run, of several, of an evaluation? Every text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from finetune.report.comparison import key_notes, result_rows
from finetune.report.cost import cost_of
from finetune.report.data_page import split_content
from finetune.report.evaluation_text import LONGEST_SAMPLE, evaluation_table, notes_of, task_lines
from finetune.report.memory import memory_of
from finetune.report.page import figures_of, sentence_of
from finetune.report.reading import Reading
from finetune.report.results import results_of
from finetune.report.shown import NOT_KNOWN, shown_value

TEXT = "text-align: left; vertical-align: top; white-space: pre-wrap"
LONG = "white-space: pre-wrap; overflow-wrap: anywhere"
BARS = (
    "<style>.finetune-data td.bar { width: 20em; text-align: left } "
    ".finetune-data td.bar div { background: #7a9cc6; height: .9em } "
    f".finetune-data pre {{ {LONG} }}</style>"
)
"""For the bars of lengths, which are divisions of some width."""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table; texts keep their line breaks."""
    head = "".join(f'<th style="{TEXT}">{escape(name)}</th>' for name in heads)
    body = "".join(
        "<tr>" + "".join(f'<td style="{TEXT}">{escape(cell)}</td>' for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def run_cell(reading: Reading) -> str:
    """What ran, and what it came to: the figures of the run's page."""
    cost, memory = cost_of(reading), memory_of(reading)
    found = results_of(reading, cost, memory)
    figures = [row for row in figures_of(reading, cost, memory, found) if row[1] != NOT_KNOWN]
    parts = [
        f"<p><b>{escape(reading.run_dir.path.name)}</b>: {escape(reading.status)} "
        f"({escape(sentence_of(reading))})</p>",
        table(("", "", ""), figures),
    ]
    error = reading.report.get("error")
    if error:
        parts.append(f'<pre style="{LONG}">{escape(str(error))}</pre>')
    checks = checks_told(reading.report.get("verified"))
    model = f"model: {reading.run_dir.model} ({checks})" if reading.run_dir.model.exists() else "no model yet"
    return "".join([*parts, f"<p>{escape(model)}<br>folder: {escape(str(reading.run_dir.path))}</p>"])


def checks_told(verified: Any) -> str:
    """How many checks of the saved model it passed."""
    checks = [check for check in verified if isinstance(check, dict)] if isinstance(verified, list) else []
    if not checks:
        return "not checked"
    passed = sum(check.get("passed") is True for check in checks)
    return f"{passed} of {len(checks)} checks passed"


def comparison_cell(record: dict[str, Any]) -> str:
    """Results side by side with how many times those of the first they are, and the keys that differ."""
    names = [run["name"] for run in record["runs"]]
    rows = [
        [title, *(f"{value}\n{ratio}" if ratio else value for value, ratio in cells)]
        for title, cells in result_rows([run["results"] for run in record["runs"]])
        if any(value != NOT_KNOWN for value, _ in cells)
    ]
    keys = [[key, *map(shown_value, values)] for key, values in record["differing_keys"].items()]
    differing = table(["key that differs", *names], keys) if keys else "<p>Keys that differ:</p>"
    notes = "".join(f"<p>{escape(note)}</p>" for note in key_notes(record))
    return table(["", *names], rows) + differing + notes


def evaluation_cell(record: dict[str, Any]) -> str:
    """Figures of base and tuned, what their intervals mean, and answers beside the references."""
    models, (heads, *figures) = record["models"], evaluation_table(record)
    parts = [table(heads, [row[: len(heads)] for row in figures])] if figures else []
    parts += [f"<p>{escape(note)}</p>" for note in notes_of(record)]
    tasks = task_lines(models)
    parts += [f"<pre>{escape(chr(10).join(tasks))}</pre>"] if tasks else []
    rows = []
    for place, first in enumerate(models[0]["samples"]):
        answers = (model["samples"][place]["answer"] for model in models)
        rows.append([_short(text) for text in (first["prompt"], first["reference"], *answers)])
    if rows:
        parts.append(table(["prompt", "reference", *(model["name"] for model in models)], rows))
    return "".join(parts)


def data_cell(splits: dict[str, dict[str, Any] | None], lines: list[str]) -> str:
    """Counts, lengths as bars, and samples with the learnt text marked."""
    parts = [BARS, f"<pre>{escape(chr(10).join(lines))}</pre>"]
    parts.append("<p>Learnt text is <mark>marked</mark>; the rest is only read.</p>")
    for name, said in splits.items():
        if said is not None:
            parts += [f"<h4>{escape(name)}</h4>", split_content(said)]
    return f'<div class="finetune-data">{"".join(parts)}</div>'


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_SAMPLE else f"{text[:LONGEST_SAMPLE]} [...]"
