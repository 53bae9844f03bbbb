"""Samples on a terminal."""

from __future__ import annotations

from typing import Any

from finetune.report.data_text import END, GREEN, sample_lines

PIECES = [
    {"text": "user: who has\nthe red Ruby by now\n", "supervised": False},
    {"text": "Ruby by has it.", "supervised": True},
    {"text": "\n", "supervised": False},
    {"text": "\n" + "x" * 25, "supervised": True},
]
SAID: dict[str, Any] = {"samples": [{"place": "a.jsonl line 1", "pieces": PIECES}]}


def test_rows_are_broken_between_words_and_marks_enclose_what_is_learnt() -> None:
    assert sample_lines("train", SAID, colour=False, columns=28) == [
        "train: a.jsonl line 1, learnt text in {+ +}",
        "  | user: who has",
        "  | the red Ruby by now",
        "  | {+Ruby by has it.+}",
        "  | {+",
        f"  | {'x' * 20}",
        f"  | {'x' * 5}+}}",
    ]
    said = {"samples": [{"place": "", "pieces": [{"text": "Ella and Ruby by now", "supervised": True}] * 2}]}
    rows = sample_lines("train", said, colour=False, columns=0)[1:]
    assert rows == ["  | {+Ella and Ruby by ", "  | nowElla and Ruby by ", "  | now+}"]


def test_a_colour_ends_with_its_row() -> None:
    rows = sample_lines("train", SAID, colour=True, columns=28)[1:]
    assert rows[2:] == [
        f"  | {GREEN}Ruby by has it.{END}",
        f"  | {GREEN}{END}",
        f"  | {GREEN}{'x' * 20}{END}",
        f"  | {GREEN}{'x' * 5}{END}",
    ]
