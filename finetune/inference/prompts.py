"""What is asked: a text, a conversation, or a file of them, and the tokens that the model reads. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.control import ControlWords
from finetune.data.convert import Example
from finetune.data.turns import BadRow, messages, tools
from finetune.errors import Problem, Refusal, UserError, refuse
from finetune.model.tokenizer import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SUBJECT = "the prompts"
SHOWN = 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """One thing that is asked."""

    place: str
    """Where it stands, for people."""
    turns: list[dict[str, Any]]
    """A conversation whose last turn waits for an answer; of a text a single user's turn."""
    tools: list[Any] | None = None

    @property
    def text(self) -> str:
        """The last turn, for people."""
        return str(self.turns[-1]["content"])


def as_prompts(asked: Any) -> list[Prompt]:
    """A text, a conversation, or a list of either."""
    several = isinstance(asked, Iterable) and not isinstance(asked, (str, dict))
    prompts = list(asked) if several else [asked]
    if not prompts:
        raise refuse("the prompt", "the list of prompts is empty", subject=SUBJECT)
    if several and isinstance(prompts[0], dict):  # a conversation is a list too
        prompts = [prompts]
    return [as_prompt(one, f"prompt {number}") for number, one in enumerate(prompts, 1)]


def as_prompt(asked: str | Sequence[dict[str, Any]], place: str = "the prompt") -> Prompt:
    """A text is what a user says; a conversation ends with the turn that is answered."""
    if isinstance(asked, dict) or not isinstance(asked, Iterable):
        got = "one turn of it" if isinstance(asked, dict) else type(asked).__name__
        why = f"expected a text or a conversation, got {got}"
        raise refuse(place, why, "A conversation is a list of turns.", subject=SUBJECT)
    try:
        return _prompt({"prompt": asked} if isinstance(asked, str) else {"messages": list(asked)}, place)
    except BadRow as bad:
        raise refuse(place, str(bad), subject=SUBJECT) from bad


def read_prompts(file: Path) -> list[Prompt]:
    """One prompt a line of a .txt; of a .jsonl rows with `prompt` or `messages`, and `tools` if any.

    Raises:
        Refusal: the file cannot be read, or some of its rows are wrong: all of them are named.
    """
    if file.suffix not in (".txt", ".jsonl"):
        why = "prompts are read from .txt (one a line) and .jsonl (rows with `prompt` or `messages`)"
        raise refuse(str(file), why, subject=SUBJECT)
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = f"it cannot be read: {getattr(error, 'strerror', None) or error}"
        raise refuse(str(file), why, subject=SUBJECT) from error
    found, problems = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{file} line {number}"
        try:
            found.append(_prompt({"prompt": line} if file.suffix == ".txt" else _row(line), place))
        except BadRow as bad:
            problems.append(Problem(place, str(bad)))
    if problems:
        more = [Problem(f"and {len(problems) - SHOWN} more", "")] if len(problems) > SHOWN else []
        raise Refusal([*problems[:SHOWN], *more], SUBJECT)
    if not found:
        raise refuse(str(file), "it holds no prompts", subject=SUBJECT)
    return found


class PromptEncoder:
    """Turns prompts into tokens as training does: the chat template, control words that are only spelled."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, plain: bool) -> None:
        """`plain`: texts stand as they are, for a model that was trained on texts without roles."""
        self.tokenizer = tokenizer
        self.plain = plain or not tokenizer.chat_template
        self.control = ControlWords(tokenizer)

    def encode(self, prompt: Prompt) -> list[int]:
        """The tokens up to where the answer begins."""
        if self.plain:
            return self._encode_text(prompt)
        hidden = self.control.hide(Example(0, 0, turns=prompt.turns, tools=prompt.tools))
        options = {"tools": hidden.tools} if hidden.tools else {}
        try:
            text = render(self.tokenizer, hidden.turns or [], add_generation_prompt=True, **options)
        except UserError as error:
            raise refuse(prompt.place, str(error), subject=SUBJECT) from error
        if hidden.turns is prompt.turns:
            ids: list[int] = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
            return ids
        pieces = self.control.encode(text, [])
        if pieces is None:
            why = "it spells control tokens of the chat template, which this tokenizer cannot tell apart"
            raise refuse(prompt.place, why, "Spell them otherwise.", subject=SUBJECT)
        return pieces.ids

    def _encode_text(self, prompt: Prompt) -> list[int]:
        """A text with what the tokenizer itself puts before one, and without what it puts behind."""
        if len(prompt.turns) > 1 or prompt.tools:
            why = "it is a conversation, and the model has no chat template or was trained on plain text"
            raise refuse(prompt.place, why, "Give one text.", subject=SUBJECT)
        backend = self.tokenizer.backend_tokenizer
        bare = backend.encode(prompt.text, add_special_tokens=False).ids
        full = backend.encode(prompt.text, add_special_tokens=True).ids
        start = next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)
        return [*full[:start], *bare]


def _row(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadRow(f"not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadRow("a row must be an object with `prompt` or `messages`")
    return row


def _prompt(row: dict[str, Any], place: str) -> Prompt:
    if ("prompt" in row) == ("messages" in row):
        raise BadRow("a row has either `prompt` or `messages`")
    if isinstance(row.get("prompt"), str):
        if not row["prompt"].strip():
            raise BadRow("the prompt is empty")
        return Prompt(place, [{"role": "user", "content": row["prompt"]}], tools(row, "tools"))
    turns = messages(row, "messages" if "messages" in row else "prompt")
    if turns[-1]["role"] == "assistant":
        raise BadRow("the conversation ends with an answer: nothing is asked")
    return Prompt(place, turns, tools(row, "tools"))
