"""Does it fit, under which strategy, how fast, from Python: a plan as text and as a table."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from finetune.config.compose import compose
from finetune.config.schema import RunConfig
from finetune.errors import refuse
from finetune.planner.answer import Planned, answer
from finetune.planner.record import as_record
from finetune.report.plan_text import COLUMNS, cells, plan_lines, told_lines

if TYPE_CHECKING:
    import pandas


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
    def why(self) -> str:
        """Why this strategy, in words."""
        return self._planned.plan.why

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
