"""A checklist as a terminal shows it, line by line, and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from finetune.doctor.check import FAIL, PASS, WARN, Check
from finetune.hardware.survey import MachineReport

SHOWN = {PASS: "pass", WARN: "warn", FAIL: "FAIL"}
COLOURS = {PASS: "\x1b[32m", WARN: "\x1b[33m", FAIL: "\x1b[1;31m"}
PLAIN = "\x1b[0m"
NAME, INDENT, DO = 14, " " * 9, "what to do: "


def is_ok(checks: Sequence[Check]) -> bool:
    """Nothing that would stop a run."""
    return all(check.status != FAIL for check in checks)


def check_text(number: int, check: Check, columns: int, *, colour: bool) -> str:
    """One check with its number, its reason and what to do."""
    return "\n".join(_lines(number, check, columns, colour))


def verdict_text(checks: Sequence[Check], columns: int) -> str:
    """The count, and what it comes to."""
    return "\n".join(["", *_filled("", _verdict(checks), columns)])


def record(checks: Sequence[Check], report: MachineReport) -> dict[str, Any]:
    """What `--json` prints."""
    return {"ok": is_ok(checks), "checks": [asdict(check) for check in checks], "machine": asdict(report)}


def _lines(number: int, check: Check, columns: int, colour: bool) -> list[str]:
    head = f"{number:>2} {SHOWN[check.status]}  {check.name:<{NAME}} "
    detail, *matrix = check.detail.split("\n")  # a matrix has lines of its own, which are not filled up
    lines = _filled(head, detail, columns) + [f"{INDENT}{line}" for line in matrix]
    for number, way in enumerate(check.fix.splitlines()):
        head = f"{INDENT}{DO if number == 0 else ' ' * len(DO)}"
        lines += _filled(head, way.strip(), columns)
    if colour:
        shown = SHOWN[check.status]
        lines[0] = lines[0].replace(shown, f"{COLOURS[check.status]}{shown}{PLAIN}", 1)
    return lines


def _filled(head: str, text: str, columns: int) -> list[str]:
    """The text beside its head, the lines after the first below the text; commands are not broken."""
    wrapped = textwrap.wrap(
        text,
        columns,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapped or [head.rstrip()]


def _verdict(checks: Sequence[Check]) -> str:
    counts = {status: [check.name for check in checks if check.status == status] for status in SHOWN}
    told = f"{len(counts[PASS])} passed, {len(counts[WARN])} to look at, {len(counts[FAIL])} failed"
    if counts[FAIL]:
        return f"{told}: a run would not go well here ({', '.join(counts[FAIL])})"
    if counts[WARN]:
        return f"{told}: nothing would stop a run here (look at: {', '.join(counts[WARN])})"
    return f"{told}: nothing would stop a run here"
