"""What a row asks."""

from __future__ import annotations

from finetune.data.documents import Question, question_of


def test_a_question_is_what_stands_before_the_last_answer() -> None:
    ids = [1, 2, 3, 4, 5, 6]
    assert question_of(ids, [-100, 2, -100, -100, 5, -100]) == Question([1, 2, 3, 4], [5])
    assert question_of(ids, [-100, -100, -100, 4, 5, 6]) == Question([1, 2, 3], [4, 5, 6])
    assert question_of(ids, ids) is None
    assert question_of(ids, [-100] * 6) is None
