"""How an evaluation looks on a terminal."""

from __future__ import annotations

from finetune.report.evaluation_text import printable, side_by_side


def test_answers_stand_beside_each_other_where_there_is_room() -> None:
    said = {"base": "The ball is red.", "tuned": "Arr! " + "The ball is red, matey! " * 3}
    wide = side_by_side(said, 80)
    assert all(" | " in line for line in wide)
    assert all(len(line) <= 80 for line in wide)
    narrow = side_by_side(said, 50)
    assert not any(" | " in line for line in narrow)
    assert narrow[0] == "  base       The ball is red."
    assert "  tuned" in narrow[1]


def test_a_text_cannot_move_the_cursor() -> None:
    assert printable("a\x1b[2Jb\nc") == "a\\x1b[2Jb\nc"
