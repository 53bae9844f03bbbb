"""How do figures read on a page: sizes, durations, rates and values of any kind?"""

from __future__ import annotations

import json
from typing import Any

NOT_KNOWN = "not known"
WIDTH = 80
"""Characters of a line where no terminal says how many it has room for."""


def shown_value(value: Any) -> str:
    """A config's value, as YAML has it on one line."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def shown_count(value: float | None) -> str:
    return NOT_KNOWN if value is None else f"{value:,.0f}"


def shown_loss(value: float | None) -> str:
    return NOT_KNOWN if value is None else f"{value:.4f}"


def shown_size(value: float | None) -> str:
    return NOT_KNOWN if value is None else f"{value / 1e9:,.2f} GB"


def shown_seconds(value: float | None) -> str:
    """Three figures where it is short, whole minutes where it is long."""
    if value is None:
        return NOT_KNOWN
    if value < 100:
        return f"{value:.3g} s"
    minutes = round(value / 60)
    return f"{value / 60:.1f} min" if value < 3600 else f"{minutes // 60:,} h {minutes % 60:02d} min"


def shown_hours(value: float | None) -> str:
    """Three figures, and whole ones where it is long."""
    if value is None:
        return NOT_KNOWN
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def shown_money(value: float | None, currency: str) -> str:
    """Cents; of less than one unit two figures."""
    if value is None:
        return NOT_KNOWN
    return f"{value:,.2f} {currency}".rstrip() if value >= 1 else f"{value:.2g} {currency}".rstrip()
