"""Answers before and after: the first and the last step of each prompt, in the order they were asked."""

from __future__ import annotations

import json
from pathlib import Path

from finetune.report.answers import CHARACTERS, PROMPTS, read_answers


def test_a_prompt_has_its_first_and_its_last_answer(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    rows = [
        *(
            {"step": step, "prompt": prompt, "answer": f"{prompt} at {step}"}
            for step in (0, 5, 9)
            for prompt in "ba"
        ),
        {"step": 9, "prompt": [{"role": "user", "content": "\u00e9"}], "answer": "x" * (CHARACTERS + 7)},
    ]
    broken = ["{", "[]", '{"step": 1}', '{"step": "1", "prompt": "a", "answer": "b"}']
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "\n".join(broken))
    found = read_answers(path)
    assert [one.prompt for one in found.shown[:2]] == ["b", "a"]
    assert (found.shown[0].before, found.shown[0].before_step) == ("b at 0", 0)
    assert (found.shown[1].after, found.shown[1].after_step) == ("a at 9", 9)
    assert '"content": "\u00e9"' in found.shown[2].prompt
    assert found.shown[2].after.endswith("x [... 7 more characters]")
    assert found.notes == ["samples.jsonl: what cannot be read is left out: 4 of its lines."]


def test_prompts_beyond_the_shown_ones_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    rows = [
        {"step": step, "prompt": f"p{number}", "answer": "a"}
        for step in (0, 1)
        for number in range(PROMPTS + 3)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = read_answers(path)
    assert (len(found.shown), found.left_out, found.there) == (PROMPTS, 3, True)
    assert not read_answers(tmp_path / "none.jsonl").there
