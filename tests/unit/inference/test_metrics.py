"""What counts as the same answer."""

from __future__ import annotations

import pytest

from finetune.errors import Problem
from finetune.inference.metrics import exact_match, final_number, find_metrics, normalized_match


@pytest.mark.parametrize(
    ("answer", "reference", "exact", "normalized"),
    [
        ("It is 12.", " It is 12.\n", 1.0, 1.0),
        ("it is  12", "It is 12.", 0.0, 1.0),
        ("STRASSE!", "stra\u00dfe", 0.0, 1.0),
        ("<think>\nhm\n</think>\n\nIt is 12.", "It is 12.", 1.0, 1.0),
        ("It is 13.", "It is 12.", 0.0, 0.0),
        ("", "It is 12.", 0.0, 0.0),
    ],
)
def test_answers_are_held_against_the_reference_exactly_and_normalised(
    answer: str, reference: str, exact: float, normalized: float
) -> None:
    assert exact_match(answer, reference, "") == exact
    assert normalized_match(answer, reference, "") == normalized


@pytest.mark.parametrize(
    ("answer", "reference", "worth"),
    [
        ("48 / 2 = 24, so $1,072.00 in all", "24 and then\n#### 1072", 1.0),
        ("It is 72", "#### 71", 0.0),
        ("no idea", "#### 71", 0.0),
        ("-3", "minus: -3.0", 1.0),
        ("7", "seven", None),
    ],
)
def test_the_last_number_decides(answer: str, reference: str, worth: float | None) -> None:
    assert final_number(answer, reference, "") == worth


def test_every_metric_that_cannot_be_had_is_told() -> None:
    problems: list[Problem] = []
    found = find_metrics(["final_number", "beauty", "no.such:thing", "json:nothing", "sys:path"], problems)
    assert list(found) == ["exact_match", "normalized_match", "final_number"]
    assert [problem.where for problem in problems] == [
        "--metric beauty",
        "--metric no.such:thing",
        "--metric json:nothing",
        "--metric sys:path",
    ]
