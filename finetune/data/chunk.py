"""Rows as they are read: a part of a file, each row with its place, bad ones named."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from finetune.data.source import SUBJECT
from finetune.errors import Problem, Refusal


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of one file: JSON lines still as bytes, everything else as columns and values."""

    file: str
    unit: str
    """What a number counts: `line` or `row`."""
    numbers: list[int]
    """1-based place of each row in its file."""
    items: list[Any]
    problems: tuple[tuple[int, Problem], ...] = ()
    """Rows that could not even be read, by their number."""

    def rows(self) -> tuple[list[int], list[dict[str, Any]], list[Problem]]:
        """Parse: the numbers and values of good rows, and what is wrong with the others."""
        numbers: list[int] = []
        rows: list[dict[str, Any]] = []
        problems = [problem for _, problem in self.problems]
        for number, item in zip(self.numbers, self.items, strict=True):
            try:
                row = json.loads(item.decode("utf-8").rstrip()) if isinstance(item, bytes) else item
            except UnicodeDecodeError as error:
                problems.append(
                    self.problem(number, f"not UTF-8: byte 0x{item[error.start]:02x} at {error.start + 1}")
                )
                continue
            except (json.JSONDecodeError, RecursionError) as error:
                problems.append(self.problem(number, _json_error(error), f"It reads: {_excerpt(item)}"))
                continue
            if not isinstance(row, dict):
                why = f"a row must be a JSON object of columns, this is a {json_type(row)}"
                problems.append(self.problem(number, why))
                continue
            numbers.append(number)
            rows.append(row)
        return numbers, rows, problems

    def first(self, count: int) -> Chunk:
        """The first rows alone, and the problems before the last of them."""
        last = self.numbers[count - 1] if count <= len(self.numbers) else None
        problems = tuple(entry for entry in self.problems if last is None or entry[0] < last)
        return replace(self, numbers=self.numbers[:count], items=self.items[:count], problems=problems)

    def problem(self, number: int, why: str, fix: str = "") -> Problem:
        """Say what is wrong with the row of this number."""
        return Problem(f"{self.file} {self.unit} {number}", why, fix)


def refuse_rows(problems: list[Problem], total: int) -> Refusal:
    """Build the refusal for bad rows: the first twenty in words, all of them counted, each advice once."""
    shown = [
        Problem(p.where, p.why, p.fix if p.fix not in {q.fix for q in problems[:i]} else "")
        for i, p in enumerate(problems)
    ]
    more = total - len(problems)
    if more > 0:
        shown.append(Problem(f"and {more} more bad rows", ""))
    return Refusal(shown, f"{SUBJECT} ({total} bad rows)" if total > 1 else SUBJECT)


def _json_error(error: json.JSONDecodeError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at character {error.pos + 1}"
    return "nested too deeply"


def _excerpt(line: bytes) -> str:
    text = "".join(c if c.isprintable() else " " for c in line.decode("utf-8", "replace").strip())
    return text if len(text) <= 80 else f"{text[:50]} ... {text[-25:]}"


def json_type(value: Any) -> str:
    names = {list: "list", dict: "object", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
