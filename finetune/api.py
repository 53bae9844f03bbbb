"""The Python API: train from a script or a notebook, and look at a run."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.compose import compose
from finetune.config.schema import RunConfig
from finetune.distributed.outer import outer_launch
from finetune.errors import RunFailed, refuse
from finetune.paths import RunDir
from finetune.planner.answer import Planned, answer
from finetune.planner.record import as_record
from finetune.report.plan_text import COLUMNS, cells, plan_lines, told_lines
from finetune.report.record import read_report
from finetune.training.start import check_run

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes


class PlanView:
    """A plan to look at: text in a terminal, a table in a notebook."""

    def __init__(self, planned: Planned) -> None:
        self._planned = planned

    @property
    def record(self) -> dict[str, Any]:
        """What `finetune plan --json` prints."""
        return as_record(self._planned.plan, self._planned.config)

    @property
    def fits(self) -> bool:
        return self._planned.plan.fits

    @property
    def table(self) -> pandas.DataFrame:
        """One row for each strategy, the one that is taken first."""
        import pandas

        plan = self._planned.plan
        return pandas.DataFrame([cells(option, plan) for option in plan.options], columns=list(COLUMNS))

    def __repr__(self) -> str:
        return plan_lines(self._planned.plan, self._planned.config)

    def _repr_html_(self) -> str:
        told = "<br>".join(html.escape(line) for line in told_lines(self._planned.plan, self._planned.config))
        return f"{self.table.to_html(index=False)}<p>{told}</p>"


class Run:
    """A run's folder, to look at."""

    def __init__(self, path: str | Path) -> None:
        self.dir = RunDir(Path(path))

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
    def metrics(self) -> pandas.DataFrame:
        """One row per logged step: step, loss, learning_rate, grad_norm, tokens_per_second, ..."""
        import pandas

        lines = self.dir.metrics.read_text(encoding="utf-8").splitlines()
        return pandas.DataFrame([json.loads(line) for line in lines])

    def plot(self, *columns: str) -> Axes:
        """Draw metrics over the steps; without names: the loss, and the evaluation loss if there is one."""
        metrics = self.metrics
        names = columns or tuple(name for name in ("loss", "eval_loss") if name in metrics)
        axes: Axes | None = None
        for name in names:
            axes = metrics[["step", name]].dropna().plot(x="step", y=name, ax=axes, title=self.path.name)
        assert axes is not None
        return axes

    def __repr__(self) -> str:
        report = self.report if self.dir.report.exists() else {}
        loss = report.get("loss") or {}
        status, steps = report.get("status"), report.get("steps")
        return f"Run({str(self.path)!r}, status={status!r}, steps={steps}, loss={loss})"


def load_config(*overrides: str) -> RunConfig:
    """Compose a config as the command line does, without checking it against this machine."""
    return compose(list(overrides)).config


def plan(*overrides: str) -> PlanView:
    """Does it fit, under which strategy, how fast: what `finetune plan` answers, for one machine.

    Raises:
        Refusal: the config or the machine is wrong, or several machines were named.
    """
    planned = answer(list(overrides))
    if len(planned) > 1:
        raise refuse(
            "hardware=[...]", "one plan is one machine", "Call plan once for each.", subject="the machine"
        )
    return PlanView(planned[0])


def train(*overrides: str, say: Callable[[str], None] = print) -> Run:
    """Train as `python -m finetune` does: in processes of its own, or, inside torchrun's world, joining that.

    Raises:
        Refusal: the config, the data or the machine must be changed first.
        RunFailed: the run had started and failed.
    """
    outer = outer_launch()
    if outer is not None:
        from finetune.distributed.world import current_world
        from finetune.logs import set_up_logging
        from finetune.training.diagnosis import look_before
        from finetune.training.join import open_together, run_to_its_end
        from finetune.training.process import guarded
        from finetune.training.worker import run as run_worker

        world = current_world()
        main = world.is_main
        set_up_logging(main=main)
        with ExitStack() as lock:
            run_dir, completed = open_together(list(overrides), outer, say, lock)
            if completed:
                return Run(run_dir.path)
            work = partial(guarded, run_dir, world.rank, run_worker)
            code = run_to_its_end(look_before(run_dir), work, say) if main else work()
    else:
        from finetune.training.supervise import found_to_resume, start_and_wait

        run = check_run(list(overrides))
        for line in run.lines:
            say(line)
        resume = found_to_resume(run, say)
        if resume is not None and resume.completed:
            return Run(resume.run_dir.path)
        run_dir, end = start_and_wait(run, say, relay=say, resume=resume)
        code = end.exit_code
    if code != 0:
        how = "was stopped" if code > 128 else "did not end well"
        raise RunFailed(f"the run {how}; its folder: {run_dir.path}", code)
    return Run(run_dir.path)
