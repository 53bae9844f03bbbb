"""Which charts does a page have? Data for plotly.js, which the page draws itself with `page.js`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from finetune.report.metrics import Curve, Metrics

COLOURS = 8
"""That `page.css` has for curves, in light and in dark."""
FEW = 60
"""A curve of fewer points shows each of them."""
AXES = {"steps": "steps", "epochs": "epochs", "tokens": "tokens", "seconds": "training time"}


@dataclass(frozen=True, slots=True)
class Chart:
    """A place for curves on the page."""

    name: str
    title: str
    unit: str
    values: tuple[str, ...]


CHARTS = (
    Chart("loss", "Loss", "mean over learnt tokens", ("loss", "eval_loss")),
    Chart("learning_rate", "Learning rate", "", ("learning_rate",)),
    Chart("grad_norm", "Gradient norm", "before clipping", ("grad_norm",)),
    Chart("tokens_per_second", "Tokens per second", "over all processes", ("tokens_per_second",)),
)
TITLES = {"loss": "training", "eval_loss": "held-out rows"}


def charts_of(runs: dict[str, Metrics]) -> dict[str, Any]:
    """What `page.js` draws: each chart that has a point, and the axes that every curve of it knows."""
    charts, known = [], []
    for chart in CHARTS:
        curves = _curves(chart, runs)
        known += [curve["points"] for curve in curves]
        if curves:
            charts.append({"name": chart.name, "title": chart.title, "unit": chart.unit, "curves": curves})
    axes = {
        axis: title
        for axis, title in AXES.items()
        if known and all(any(value is not None for value in points[axis]) for points in known)
    }
    unknown = [title for axis, title in AXES.items() if known and axis not in axes]
    return {"charts": charts, "axes": axes, "unknown": unknown}


def _curves(chart: Chart, runs: dict[str, Metrics]) -> list[dict[str, Any]]:
    """One run has a colour for each curve; of several, each run has its own."""
    curves = []
    for place, (run, metrics) in enumerate(runs.items()):
        for part, value in enumerate(chart.values):
            if value not in metrics.curves:
                continue
            title = TITLES.get(value, chart.title)
            names = [run, title] if len(chart.values) > 1 else [run]
            curves.append(
                {
                    "name": ", ".join(names) if len(runs) > 1 else title,
                    "colour": (place if len(runs) > 1 else part) % COLOURS,
                    "dashed": value == "eval_loss",
                    **_drawn(metrics.curves[value]),
                }
            )
    return curves


def _drawn(curve: Curve) -> dict[str, Any]:
    return {"dotted": len(curve.values) <= FEW, "points": curve.thinned().as_record()}
