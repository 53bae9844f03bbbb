"""How does a template become one file that needs nothing beside itself?"""

from __future__ import annotations

import re
from datetime import datetime
from functools import cache
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from finetune.paths import PACKAGE
from finetune.report.shown import shown_value
from finetune.version import __version__

TEMPLATES = PACKAGE / "report" / "templates"


def render(template: str, drawn: dict[str, Any], **values: Any) -> str:
    """Fill in a template: every text is escaped; plotly.js is put in once, and only where it has to draw."""
    return (
        _templates()
        .get_template(template)
        .render(
            **values,
            drawn=drawn,
            style=_own("page.css"),
            script=_own("page.js"),
            plotly=_plotly() if drawn["charts"] else "",
            made=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
            version=__version__,
        )
    )


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = shown_value
    environment.filters["breakable"] = _breakable
    return environment


def _breakable(text: str) -> Markup:
    """A key breaks behind its dots and underscores where the line is too short for it, and nowhere else."""
    return Markup("<wbr>").join(re.split(r"(?<=[._])(?=[a-z])", text))


def _own(name: str) -> Markup:
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


def _plotly() -> Markup:
    from plotly.offline import get_plotlyjs  # megabytes: only where a page is made

    return Markup(get_plotlyjs())
