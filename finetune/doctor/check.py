"""One line of a checklist: what was looked at, how it is, why, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

PASS, WARN, FAIL = "pass", "warn", "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: str
    """`pass`; `warn`: the run goes on, and may be slow or end early; `fail`: the run would not go well."""
    detail: str
    """What was seen, in numbers."""
    fix: str = ""
    """What to do about it; empty where nothing has to be done."""
