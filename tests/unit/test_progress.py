"""Stages where nobody watches; at a terminal they are looked at in a real run."""

from __future__ import annotations

import io
import time

import pytest

from finetune import progress
from finetune.progress import current, stage


def test_a_stage_tells_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "TOLD_SECONDS", 0.05)
    with stage("preparing rows", "rows") as going:
        assert current() is going
        for _ in going.over(range(1200)):
            pass
        time.sleep(0.2)
    assert current() is None
    out, err = capsys.readouterr()
    assert out == ""
    assert "preparing rows, 1,200 of 1,200 rows, for 0:00\n" in err


def test_a_short_stage_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with stage("saving    the model"):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_stage_that_ends_in_an_error_is_over() -> None:
    with pytest.raises(KeyError), stage("merging"):
        raise KeyError
    assert current() is None


def test_a_line_is_told_above_the_bar_and_plainly_where_there_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_own_screen", io.StringIO)
    with progress.stage("preparing", "rows"):
        progress.tell("during")
    progress.tell("after")
    assert capsys.readouterr().out == f"{progress.CLEAR}during\nafter\n"
