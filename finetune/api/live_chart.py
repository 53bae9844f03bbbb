"""How does a notebook see a run while it trains? Its losses are drawn below the cell, again and again."""

from __future__ import annotations

import logging
import sys
import time
from contextvars import copy_context
from importlib import import_module
from io import BytesIO
from threading import Event, Thread
from typing import Any

from finetune.paths import RunDir
from finetune.report.charts import FEW, TITLES
from finetune.report.metrics import Metrics, read_metrics

log = logging.getLogger(__name__)

PAUSE_SECONDS = 2.0
"""Between two drawings, at least."""
SHARE = 0.05
"""Of the time that reading and drawing may take: a run of a million steps is looked at less often."""


class LiveChart:
    """Draws from `watch` until the `with` block is left; where no notebook looks on it does nothing."""

    def __init__(self) -> None:
        self.run_dir: RunDir | None = None
        self._ended = Event()
        self._thread: Thread | None = None
        self._handle: Any = None
        self._seen = 0

    def __enter__(self) -> LiveChart:
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def watch(self, run_dir: RunDir) -> None:
        """The run has its folder. What it logged in an earlier start is drawn too."""
        self.run_dir = run_dir
        if in_notebook():
            # in the context of this cell: what is displayed belongs below it
            self._thread = Thread(target=copy_context().run, args=(self._draw_on, run_dir), daemon=True)
            self._thread.start()

    def _draw_on(self, run_dir: RunDir) -> None:
        pause = PAUSE_SECONDS
        try:
            while not self._ended.wait(pause):
                started = time.monotonic()
                self._draw(run_dir)
                pause = max(PAUSE_SECONDS, (time.monotonic() - started) / SHARE)
            self._draw(run_dir)
        except Exception as error:  # noqa: BLE001 - nobody's run ends because its picture fails
            log.warning("the chart below the cell ends (%s: %s)", type(error).__name__, error)

    def _draw(self, run_dir: RunDir) -> None:
        """Unless nothing was logged since."""
        shown = import_module("IPython.display")  # of the kernel that runs us: no dependency of ours
        size = run_dir.metrics.stat().st_size if run_dir.metrics.exists() else 0
        if size == self._seen:
            return
        self._seen = size
        metrics = read_metrics(run_dir.metrics)
        if not metrics.curves:
            return
        picture = shown.Image(data=losses_drawn(metrics, run_dir.path.name), format="png")
        if self._handle is None:
            self._handle = shown.display(picture, display_id=True)
        else:
            self._handle.update(picture)


def in_notebook() -> bool:
    """Whether this is a kernel, which somebody may look at; a terminal's IPython shows no pictures."""
    kernel = sys.modules.get("ipykernel.zmqshell")
    return kernel is not None and kernel.ZMQInteractiveShell.initialized()


def losses_drawn(metrics: Metrics, name: str) -> bytes:
    """The losses over the steps, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    FigureCanvasAgg(figure)  # past pyplot: it belongs to the main thread, and to the user
    axes = figure.subplots()
    for value, title in TITLES.items():
        if value in metrics.curves:
            curve = metrics.curves[value].thinned()
            few = len(curve.values) <= FEW
            axes.plot(curve.steps, curve.values, label=title, marker="." if few else None)
    axes.set(xlabel="step", ylabel="loss", title=f"{name}: step {metrics.last_step:,}")
    axes.legend()
    file = BytesIO()
    figure.savefig(file, format="png", dpi=90)
    return file.getvalue()
