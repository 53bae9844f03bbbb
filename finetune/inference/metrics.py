"""How an answer is held against the reference: exactly, normalised, by its last number, or a user's way."""

from __future__ import annotations

import importlib
import os
import re
import sys
import unicodedata
from collections.abc import Callable
from decimal import Decimal

from finetune.errors import Problem

Metric = Callable[[str, str, str], float | bool | None]
"""`metric(answer, reference, prompt)`: what the answer is worth; None: the row does not count."""

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
THOUGHT_END = "</think>"


def exact_match(answer: str, reference: str, prompt: str) -> float:
    """The same letters, but for blanks around them."""
    return float(_spoken(answer) == _spoken(reference))


def normalized_match(answer: str, reference: str, prompt: str) -> float:
    """The same words: case, punctuation and the width of blanks do not count."""
    return float(normalized(_spoken(answer)) == normalized(_spoken(reference)))


def final_number(answer: str, reference: str, prompt: str) -> float | None:
    """The same last number; a reference without one does not count."""
    wanted = _last_number(_spoken(reference))
    return None if wanted is None else float(_last_number(_spoken(answer)) == wanted)


METRICS: dict[str, Metric] = {
    "exact_match": exact_match,
    "normalized_match": normalized_match,
    "final_number": final_number,
}
"""By the names that `--metric` knows; the first two are always measured."""
ALWAYS = ("exact_match", "normalized_match")


def normalized(text: str) -> str:
    """Lower case, no punctuation, single blanks."""
    letters = (letter for letter in text.casefold() if not unicodedata.category(letter).startswith("P"))
    return " ".join("".join(letters).split())


def find_metrics(names: list[str], problems: list[Problem]) -> dict[str, Metric]:
    """Those that are always measured, then the named ones; what cannot be had is among the problems."""
    found = {name: METRICS[name] for name in ALWAYS}
    for name in names:
        metric = METRICS.get(name) or (_own(name, problems) if ":" in name else None)
        if metric is not None:
            found[name] = metric
        elif ":" not in name:
            why = f"there is no such metric; known are {', '.join(METRICS)}"
            fix = "Or a function of yours, module:function, called with (answer, reference, prompt)."
            problems.append(Problem(f"--metric {name}", why, fix))
    return found


def _own(name: str, problems: list[Problem]) -> Metric | None:
    """Import `module:function`; modules of the working directory are found."""
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function: Metric = getattr(importlib.import_module(module_name), function_name)
    except (Exception, SystemExit) as error:  # noqa: BLE001  the user's module may fail in any way
        why = f"it cannot be imported: {type(error).__name__}: {error}"
        problems.append(Problem(f"--metric {name}", why, f"Looked in {os.getcwd()} too."))
        return None
    if not callable(function):
        problems.append(Problem(f"--metric {name}", f"{function_name} is no function"))
        return None
    return function


def _spoken(text: str) -> str:
    """What is said after thinking."""
    return text.rpartition(THOUGHT_END)[2].strip()


def _last_number(text: str) -> Decimal | None:
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
