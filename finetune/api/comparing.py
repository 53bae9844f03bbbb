"""Which run came to what, from Python: several runs side by side as a table and as curves."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from finetune.errors import Problem, Refusal, refuse
from finetune.report import comparison
from finetune.report.cells import comparison_cell
from finetune.report.charts import FEW
from finetune.report.find import find_runs
from finetune.report.reading import Reading, read_run

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes


class Comparison:
    """Runs as they were when they were compared."""

    def __init__(self, readings: list[Reading]) -> None:
        self._curves = {
            name: one.metrics.curves
            for name, one in zip(comparison.names_of(readings), readings, strict=True)
        }
        self.record: dict[str, Any] = comparison.compare(readings)
        """What `finetune report RUN RUN --json` prints, the place of its page aside."""

    @property
    def table(self) -> pandas.DataFrame:
        """One row for each run, one column for each result, unrounded."""
        import pandas

        runs = self.record["runs"]
        return pandas.DataFrame([run["results"] for run in runs], index=[run["name"] for run in runs])

    @property
    def differing_keys(self) -> pandas.DataFrame:
        """The keys that are not the same in all runs, one column for each run."""
        import pandas

        names = [run["name"] for run in self.record["runs"]]
        return pandas.DataFrame.from_dict(self.record["differing_keys"], orient="index", columns=names)

    def plot(self, column: str = "loss") -> Axes:
        """Draw a value of all runs over the steps: `loss`, `eval_loss`, `learning_rate`, ..."""
        curves = {name: own[column] for name, own in self._curves.items() if column in own}
        if not curves:
            known = dict.fromkeys(name for own in self._curves.values() for name in own)
            why = "none of the runs logged it"
            raise refuse(column, why, f"They logged: {', '.join(known) or 'nothing'}.", subject="the plot")
        import matplotlib.pyplot as pyplot

        _, axes = pyplot.subplots()
        for name, curve in curves.items():
            axes.plot(curve.steps, curve.values, label=name, marker="." if len(curve.values) <= FEW else None)
        axes.set(xlabel="step", ylabel=column)
        axes.legend()
        return axes

    def __repr__(self) -> str:
        shown = ["status", "method", "strategy", "num_processes", "steps", "final_loss", "eval_loss"]
        keys = [f"{key}: {values}" for key, values in self.record["differing_keys"].items()]
        told = "\n".join(f"  {line}" for line in [*keys, *comparison.key_notes(self.record)])
        return f"{self.table[shown].T.to_string()}\n\nkeys that differ:\n{told}"

    def _repr_html_(self) -> str:
        return comparison_cell(self.record)


def compare(*runs: str | os.PathLike[str]) -> Comparison:
    """Lay runs side by side: folders, checkpoints inside them, or `Run`s; the first is what others are held
    against.

    Raises:
        Refusal: a folder is no run, or fewer than two are named.
    """
    words = tuple(os.fspath(run) for run in runs)
    problems: list[Problem] = []
    found = find_runs(words, problems)
    if not problems and len(found) < 2:
        problems.append(
            Problem(" ".join(words) or "no run", "two runs or more are compared", "Name another.")
        )
    if problems:
        raise Refusal(problems, "the runs to compare")
    return Comparison([read_run(run_dir) for run_dir in found])
