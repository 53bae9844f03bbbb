"""What did the model answer before, and what does it answer now? Read from `samples.jsonl`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.secrets import masked

PROMPTS, CHARACTERS = 50, 4000
"""Prompts that are shown, and characters of a text."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What was answered to a prompt at the first and at the last step that it was asked."""

    prompt: str
    before: str
    before_step: int
    after: str
    after_step: int

    @property
    def again(self) -> bool:
        """Whether it was asked at more than one step."""
        return self.after_step > self.before_step


@dataclass(frozen=True, slots=True)
class Answers:
    """Of all prompts, in the order they were asked."""

    shown: list[Answer]
    notes: list[str]
    there: bool
    left_out: int = 0
    """Prompts beyond those that are shown."""


def read_answers(path: Path) -> Answers:
    """Rows of `{"step", "prompt", "answer"}`; a row that is none of them is counted and left out."""
    found: dict[str, Answer] = {}
    broken, others = 0, set()
    try:
        with path.open("rb") as file:
            for line in file:
                row = _row(line)
                if row is None:
                    broken += 1
                elif row.prompt in found or len(found) < PROMPTS:
                    found[row.prompt] = _joined(found.get(row.prompt, row), row)
                else:
                    others.add(hash(row.prompt))
    except FileNotFoundError:
        return Answers([], [], there=False)
    except OSError as error:
        return Answers([], [f"samples.jsonl cannot be read: {error.strerror}."], there=True)
    notes = [f"samples.jsonl: what cannot be read is left out: {broken:,} of its lines."] if broken else []
    shown = [
        Answer(_shown(one.prompt), _shown(one.before), one.before_step, _shown(one.after), one.after_step)
        for one in found.values()
    ]
    return Answers(shown, notes, there=True, left_out=len(others))


def _joined(known: Answer, row: Answer) -> Answer:
    first = known if known.before_step <= row.before_step else row
    last = row if row.after_step >= known.after_step else known
    return Answer(known.prompt, first.before, first.before_step, last.after, last.after_step)


def _row(line: bytes) -> Answer | None:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not {"step", "prompt", "answer"} <= row.keys():
        return None
    step = row["step"]
    if not isinstance(step, int):
        return None
    answer = _text(row["answer"])
    return Answer(_text(row["prompt"]), answer, step, answer, step)


def _text(value: Any) -> str:
    """A prompt may be a list of messages."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)


def _shown(text: str) -> str:
    text = masked(text)
    if len(text) <= CHARACTERS:
        return text
    return f"{text[:CHARACTERS]} [... {len(text) - CHARACTERS:,} more characters]"
