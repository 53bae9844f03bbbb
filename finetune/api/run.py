"""What did a run come to, from Python: its report, metrics, answers, page, and the questions to its model."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import Problem, Refusal, refuse
from finetune.inference.answers import Answers
from finetune.inference.evaluation import SAMPLES, Evaluation, evaluate
from finetune.inference.generation import generate
from finetune.paths import RunDir
from finetune.report.answers import read_answers
from finetune.report.cells import checks_told, run_cell
from finetune.report.cost import cost_of
from finetune.report.find import find_runs
from finetune.report.memory import memory_of
from finetune.report.page import sentence_of, write_page
from finetune.report.reading import read_run
from finetune.report.record import read_report
from finetune.report.results import results_of
from finetune.report.shown import shown_count, shown_loss

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes


class Run:
    """A run's folder, to look at."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.dir = RunDir(Path(path))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Run:
        """The run in this folder, or that this checkpoint belongs to.

        Raises:
            Refusal: it is no run's folder.
        """
        problems: list[Problem] = []
        found = find_runs((os.fspath(path),), problems)
        if problems:
            raise Refusal(problems, "the run")
        return cls(found[0].path)

    @property
    def path(self) -> Path:
        return self.dir.path

    @property
    def model_path(self) -> Path:
        """The saved model; it loads with plain transformers and peft."""
        return self.dir.model

    @property
    def report(self) -> dict[str, Any]:
        """`report.json`."""
        return read_report(self.dir)

    @property
    def page(self) -> Path:
        """`report.html`, made anew where the run has written something since."""
        page, written = self.dir.page, (self.dir.metrics, self.dir.samples, self.dir.report)
        changed = max((file.stat().st_mtime_ns for file in written if file.exists()), default=0)
        if not page.exists() or page.stat().st_mtime_ns < changed:
            write_page(read_run(self.dir))
        return page

    @property
    def metrics(self) -> pandas.DataFrame:
        """One row per logged step: step, loss, learning_rate, grad_norm, tokens_per_second, ..."""
        import pandas

        text = self.dir.metrics.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]  # a run that goes on may be writing a line
        return pandas.DataFrame([json.loads(line) for line in whole.splitlines()])

    @property
    def samples(self) -> pandas.DataFrame:
        """Answers to held-out prompts at the first and the last step they were asked: prompt, before,
        before_step, after, after_step.
        """
        import pandas

        names = ["prompt", "before", "before_step", "after", "after_step"]
        rows = [
            (one.prompt, one.before, one.before_step, one.after, one.after_step)
            for one in read_answers(self.dir.samples).shown
        ]
        return pandas.DataFrame(rows, columns=names)

    def plot(self, *columns: str) -> Axes:
        """Draw metrics over the steps; without names: the loss, and the evaluation loss if there is one."""
        metrics = self.metrics
        names = columns or tuple(name for name in ("loss", "eval_loss") if name in metrics)
        unknown = [name for name in names if name not in metrics]
        if unknown or not names:
            where = ", ".join(unknown) or "loss"
            fix = f"It logged: {', '.join(metrics.columns) or 'nothing'}."
            raise refuse(where, "the run did not log it", fix, subject=f"the plot of {self.path.name}")
        axes: Axes | None = None
        for name in names:
            axes = metrics[["step", name]].dropna().plot(x="step", y=name, ax=axes, title=self.path.name)
        assert axes is not None
        return axes

    def evaluate(
        self,
        *overrides: str,
        samples: int = SAMPLES,
        metrics: Sequence[str] = (),
        max_new_tokens: int | None = None,
    ) -> Evaluation:
        """`finetune.evaluate` of this run: its model and its base on held-out rows."""
        return evaluate(self, *overrides, samples=samples, metrics=metrics, max_new_tokens=max_new_tokens)

    def generate(
        self,
        prompt: str | Sequence[dict[str, Any]] | Sequence[str | Sequence[dict[str, Any]]],
        *overrides: str,
        compare: bool = False,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
    ) -> Answers:
        """`finetune.generate` with this run: answers to a prompt or several."""
        return generate(
            self,
            prompt,
            *overrides,
            compare=compare,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
        )

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        reading = read_run(self.dir)
        found = results_of(reading, cost_of(reading), memory_of(reading))
        told = f"Run {self.path}: {reading.status}"
        ran = sentence_of(reading)
        lines = [f"{told} ({ran})" if ran else told]
        if found["final_loss"] is not None:
            loss = f"loss {shown_loss(found['first_loss'])} -> {shown_loss(found['final_loss'])}"
            held_out = found["eval_loss"]
            loss += f", on held-out rows {shown_loss(held_out)}" if held_out is not None else ""
            lines.append(f"  {shown_count(found['steps'])} steps, {loss}")
        if self.dir.model.exists():
            lines.append(f"  model {self.dir.model} ({checks_told(reading.report.get('verified'))})")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return run_cell(read_run(self.dir))
