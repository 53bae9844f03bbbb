"""What the values of flags mean: numbers and lists, or why they do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from finetune.errors import refuse

T = TypeVar("T", int, None)


def number(values: Mapping[str, str], flag: str, without: T) -> int | T:
    """A whole number; `without` where the flag is not given."""
    text = values.get(flag)
    if text is None:
        return without
    try:
        return int(text)
    except ValueError as error:
        raise refuse(f"{flag} {text}", "expected a whole number", subject="the command line") from error


def fraction(values: Mapping[str, str], flag: str) -> float | None:
    """A number that need not be whole; null where the flag is not given."""
    text = values.get(flag)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError as error:
        raise refuse(f"{flag} {text}", "expected a number", subject="the command line") from error


def listed(values: Mapping[str, str], flag: str) -> list[str]:
    """Names with commas between them."""
    return [name.strip() for name in values.get(flag, "").split(",") if name.strip()]
