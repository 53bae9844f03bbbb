"""Several runs side by side: curves over each other, what was set differently, what each came to."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from finetune.paths import RunDir, write_whole
from finetune.report.charts import COLOURS, charts_of
from finetune.report.metrics import number
from finetune.report.page import thinned_lines
from finetune.report.reading import Reading
from finetune.report.render import render
from finetune.report.results import record_of
from finetune.report.settings import NOT_READ, differing_keys
from finetune.report.shown import (
    NOT_KNOWN,
    shown_count,
    shown_hours,
    shown_loss,
    shown_money,
    shown_seconds,
    shown_size,
    shown_value,
)

ROWS: dict[str, tuple[str, Callable[..., str] | None]] = {
    "status": ("status", None),
    "model": ("model", None),
    "method": ("method", None),
    "strategy": ("strategy", None),
    "num_processes": ("processes", shown_count),
    "precision": ("precision", None),
    "global_batch_size": ("global batch", shown_count),
    "steps": ("steps", shown_count),
    "supervised_tokens": ("learnt tokens", shown_count),
    "final_loss": ("final loss", shown_loss),
    "eval_loss": ("loss on held-out rows", shown_loss),
    "tokens_per_second": ("tokens per second", shown_count),
    "peak_memory_bytes": ("memory of a process", shown_size),
    "seconds": ("time", shown_seconds),
    "training_seconds": ("training steps alone", shown_seconds),
    "device_hours": ("hours of devices", shown_hours),
    "cost": ("cost", shown_money),
}
"""Title of each result, and how its figure is shown (that of money with its currency); None: it is a word."""


def compare(readings: list[Reading]) -> dict[str, Any]:
    """What `report.json` of a comparison holds; figures are unrounded."""
    named = list(zip(names_of(readings), readings, strict=True))
    runs = [{"name": name, **record_of(one)} for name, one in named]
    return {
        "made": datetime.now().astimezone().isoformat(timespec="seconds"),
        "runs": runs,
        "differing_keys": differing_keys(readings),
        "unread": [name for name, one in named if not one.config],
    }


def write_comparison(readings: list[Reading], record: dict[str, Any], folder: Path) -> Path:
    """Write `report.html` and `report.json` into the folder."""
    write_whole(folder / "report.json", json.dumps(record, indent=1, allow_nan=False) + "\n")
    page = RunDir(folder).page
    write_whole(page, comparison_page(readings, record))
    return page


def comparison_page(readings: list[Reading], record: dict[str, Any]) -> str:
    """The page as text."""
    metrics = dict(zip(names_of(readings), (one.metrics for one in readings), strict=True))
    runs = [
        {
            "name": run["name"],
            "folder": run["run_dir"],
            "missing": run["missing"],
            "colour": place % COLOURS,
        }
        for place, run in enumerate(record["runs"])
    ]
    return render(
        "comparison.html",
        charts_of(metrics),
        runs=runs,
        results=result_rows([run["results"] for run in record["runs"]]),
        thinned=thinned_lines(metrics),
        unread=record["unread"],
        keys={
            key: [value for value in values if value != NOT_READ]
            for key, values in record["differing_keys"].items()
        },
        key_notes=key_notes(record),
    )


def key_notes(record: dict[str, Any]) -> list[str]:
    """What is to be said beside the keys that differ: whose were not compared, and why there are none."""
    unread, compared = record["unread"], len(record["runs"]) - len(record["unread"])
    notes = [f"Not compared, since config.yaml cannot be read: {', '.join(unread)}."] if unread else []
    if compared < 2:
        return [*notes, "There are no two runs whose keys can be compared."]
    return notes if record["differing_keys"] else [*notes, "None, names and folders of the runs aside."]


def result_rows(results: list[dict[str, Any]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Title of each result, and for each run how it is shown and how many times that of the first it is."""
    rows = []
    for name, (title, shown) in ROWS.items():
        first = number(results[0][name])
        cells = []
        for place, own in enumerate(results):
            value = own[name]
            if shown is None:
                cells.append((NOT_KNOWN if value is None else shown_value(value), ""))
                continue
            figure = shown(value, own["currency"]) if name == "cost" else shown(value)
            comparable = place > 0 and first and value is not None
            same = name != "cost" or own["currency"] == results[0]["currency"]
            ratio = f"x {value / first:.3g}" if comparable and same else ""
            ratio = "" if ratio == "x 1" else ratio
            cells.append((figure, ratio))
        rows.append((title, cells))
    return rows


def names_of(readings: list[Reading]) -> list[str]:
    """The names of their folders; where two have the same, as much of the path as tells them apart."""
    paths = [reading.run_dir.path for reading in readings]
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len({*names}) == len(names):
            return names
    return names
