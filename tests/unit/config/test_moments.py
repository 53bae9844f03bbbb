"""A time from now or a moment; anything else says how to write it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from finetune.config.moments import moment

NOW = datetime(2030, 1, 31, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "later"),
    [
        ("90m", timedelta(minutes=90)),
        ("2h30m", timedelta(hours=2, minutes=30)),
        ("1d 2h", timedelta(days=1, hours=2)),
        ("45s", timedelta(seconds=45)),
        ("2030-01-31T18:00+00:00", timedelta(hours=6)),
    ],
)
def test_times_and_moments(text: str, later: timedelta) -> None:
    assert moment(text, NOW) == NOW + later


@pytest.mark.parametrize("text", ["", "soon", "30", "2h30", "-1h", "2030-13-01T00:00"])
def test_what_is_neither_says_how_to_write_it(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither a time nor a moment.*90m"):
        moment(text, NOW)


def test_a_moment_that_is_over_is_refused() -> None:
    with pytest.raises(ValueError, match="this moment is over"):
        moment("2030-01-31T11:00+00:00", NOW)
