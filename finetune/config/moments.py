"""When a run has to end: a moment, or a time from now."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

DURATION = re.compile(r"(?:(\d+)d)?\s*(?:(\d+)h)?\s*(?:(\d+)m)?\s*(?:(\d+)s)?")
HOW = "Write a time from now (90m, 2h30m, 1d) or a moment (2030-01-31T18:00; local unless it names a zone)."


def moment(text: str, now: datetime) -> datetime:
    """The moment that `text` stands for; raises ValueError with what is wrong."""
    parts = DURATION.fullmatch(text.strip())
    if parts is not None and any(parts.groups()):
        days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
        return now + timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    try:
        meant = datetime.fromisoformat(text.strip()).astimezone()
    except ValueError:
        raise ValueError(f"it is neither a time nor a moment. {HOW}") from None
    if meant <= now:
        raise ValueError(f"this moment is over. {HOW}")
    return meant
