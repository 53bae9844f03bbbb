"""The items of a JSON file that is one long list, read one at a time: the file may be larger than memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

BLOCK = 2**22
BLANKS = re.compile(r"[ \t\r\n]*")
CUT_OFF = 16
"""An error this near to the end of what was read may come from the cut alone."""


class NotJson(Exception):
    """What is wrong, and on which line."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(why)
        self.line = line


def items(stream: TextIO) -> Iterator[Any]:
    """Yield the values of a list."""
    window = _Window(stream)
    window.take("[")
    if window.peek() == "]":
        window.take("]")
    else:
        yield window.value()
        while window.peek() == ",":
            window.take(",")
            yield window.value()
        window.take("]")
    if window.peek():
        raise window.wrong("text after the end of the list")


class _Window:
    """The part of a document that is in memory, and how far it is read."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.text = stream.read(BLOCK).removeprefix("\ufeff")
        self.at = 0
        self.line = 1
        self.decoder = json.JSONDecoder()

    def peek(self) -> str:
        """The next character that is no blank; empty at the end."""
        while True:
            blanks = BLANKS.match(self.text, self.at)
            assert blanks is not None
            self.at = blanks.end()
            if self.at < len(self.text) or not self._more():
                return self.text[self.at : self.at + 1]

    def take(self, expected: str) -> None:
        if self.peek() != expected:
            found = repr(self.peek()) if self.peek() else "the end of the file"
            raise self.wrong(f"expected {expected!r}, found {found}")
        self.at += 1

    def value(self) -> Any:
        self.peek()
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                unfinished = error.msg.startswith("Unterminated") or error.pos + CUT_OFF > len(self.text)
                if not (unfinished and self._more()):
                    raise self.wrong(error.msg, error.pos) from error
            except RecursionError as error:
                raise self.wrong("nested too deeply") from error
            else:
                if end + CUT_OFF < len(self.text) or not self._more():  # a number may go on behind the cut
                    self.at = end
                    return value

    def wrong(self, why: str, position: int | None = None) -> NotJson:
        end = self.at if position is None else position
        return NotJson(self.line + self.text.count("\n", 0, end), why)

    def _more(self) -> bool:
        """Read on, at least as much as is waiting; what is behind is forgotten."""
        block = self.stream.read(max(BLOCK, len(self.text) - self.at))
        if block:
            self.line += self.text.count("\n", 0, self.at)
            self.text, self.at = self.text[self.at :] + block, 0
        return bool(block)
