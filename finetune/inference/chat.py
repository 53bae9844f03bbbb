"""A conversation, line by line: answers appear as they are made, in a terminal or through a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from transformers import TextStreamer

from finetune.errors import Refusal
from finetune.inference.answers import Answer
from finetune.inference.generation import Speaker
from finetune.inference.prompts import Prompt

RESET = "/reset"
HELLO = f"A line is a turn. {RESET} forgets what was said, Ctrl-C stops an answer, Ctrl-D ends."
MARK = "> "

Write = Callable[[str], None]


@dataclass(slots=True)
class Chat:
    """What was said so far, each model with its own side of it."""

    speaker: Speaker
    turns: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def ask(self, text: str, write: Write) -> list[Answer]:
        """One turn: every model answers, and `write` gets the pieces as they are made."""
        answers = []
        for name in self.speaker.names:
            turns = self.turns.setdefault(name, [])
            prompt = Prompt("the conversation", [*turns, {"role": "user", "content": text}])
            if self.speaker.encoder.plain:
                prompt = Prompt("the line", prompt.turns[-1:])  # nothing but text is read: there are no turns
            ids = self.speaker.encode(prompt)
            if len(self.speaker.names) > 1:
                write(f"{name}: ")
            pieces = _Pieces(self.speaker.tokenizer, write)
            try:
                said = self.speaker.answer(name, [ids], pieces)[0]
                answer = Answer(name, text, said.text, said.tokens, said.finished)
            except KeyboardInterrupt:  # what was said until then stays said
                answer = Answer(name, text, pieces.text.strip(), pieces.tokens, finished=False)
                write(" [stopped]")
            write("\n")
            self.turns[name] = [*prompt.turns, {"role": "assistant", "content": answer.text}]
            answers.append(answer)
        return answers

    def reset(self) -> None:
        """Forget everything."""
        self.turns.clear()


def talk(
    speaker: Speaker, lines: TextIO, write: Write, tell: Write, *, terminal: bool
) -> Iterator[list[Answer]]:
    """Answer each line until there is no more; `tell` gets what is no answer.

    `terminal`: somebody types the lines, and is shown where.
    """
    chat = Chat(speaker)
    if terminal:
        tell(f"{HELLO}\n")
    while True:
        try:
            if terminal:
                tell(MARK)
            line = lines.readline()
        except KeyboardInterrupt:
            tell("\n(Ctrl-D ends)\n")
            continue
        if not line:
            if terminal:
                tell("\n")
            return
        text = line.strip()
        if text == RESET:
            chat.reset()
            tell("(forgotten)\n" if terminal else "")
        elif text:
            try:
                yield chat.ask(text, write)
            except Refusal as refusal:
                if not terminal:
                    raise
                tell(f"{refusal}\n")


class _Pieces(TextStreamer):
    """Hands on the words of an answer as soon as they are whole."""

    def __init__(self, tokenizer: Any, write: Write) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write
        self.text = ""
        self.tokens = 0

    def put(self, value: Any) -> None:
        if not self.next_tokens_are_prompt:
            self.tokens += int(value.numel())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        self.write(text)
