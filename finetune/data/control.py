"""Control tokens that are only spelled in a text (`<|im_end|>` in a question about ChatML) stay text.

A tokenizer reads such words as the tokens themselves, wherever they stand. So they are hidden behind single
private-use characters while the chat template renders, and the pieces between the template's own tokens are
then encoded by a tokenizer that knows no added tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from finetune.data.convert import Example
from finetune.data.mask import Span
from finetune.errors import UserError
from finetune.model.tokenizer import added_tokens

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast

FIRST_MARK = 0x100000
MARKS = re.compile("[\U00100000-\U0010fffd]")
THINK = ("<think>", "</think>")
UNTOUCHED = ("role", "train", "weight")


@dataclass(slots=True)
class Pieces:
    """A text encoded piece by piece: where each token stands, in characters."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def add(self, encoded: Encoding, led: int, cut: int, piece: str) -> None:
        """Add a piece that was encoded behind `led` characters, which are the first `cut` tokens."""
        base = len(self.text) - led
        self.ids += encoded.ids[cut:]
        self.starts += [base + max(start, led) for start, _ in encoded.offsets[cut:]]
        self.ends += [base + end for _, end in encoded.offsets[cut:]]
        self.text += piece

    def add_token(self, number: int, text: str) -> None:
        self.ids.append(number)
        self.starts.append(len(self.text))
        self.text += text
        self.ends.append(len(self.text))


class ControlWords:
    """Finds, hides and encodes the control words in the contents of conversations, for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.backend = tokenizer.backend_tokenizer
        self.tokens = added_tokens(tokenizer)
        self.added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
        self.ids = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
        template = str(tokenizer.chat_template)
        special = [word for word, token in self.added.items() if token.special and word.strip()]
        printed = [word for word in self.added if word.strip() and word in template]
        self.words = sorted({*special, *printed})
        self.anywhere = _any_of(self.words)
        self.in_answers = _any_of(word for word in special if word not in THINK)
        self.marks = {word: chr(FIRST_MARK + place) for place, word in enumerate(self.words)}
        self.control_ids = frozenset(self.ids[word] for word in self.words)

    @cached_property
    def bare(self) -> Tokenizer:
        """The tokenizer without its added tokens."""
        from tokenizers import Tokenizer

        without = {**json.loads(self.backend.to_str()), "added_tokens": [], "post_processor": None}
        return Tokenizer.from_str(json.dumps(without))

    def hide(self, example: Example) -> Example:
        """Give the example back with marks in place of control words; itself if it has none."""
        assert example.turns is not None
        turns = [self._hide_turn(turn) for turn in example.turns]
        tools = _map(example.tools, self.anywhere, self.marks) if example.tools else example.tools
        if turns == example.turns and tools == example.tools:
            return example
        if MARKS.search(json.dumps([example.turns, example.tools], ensure_ascii=False)):
            raise UserError("holds control words of the chat template and private-use characters (plane 16)")
        return replace(example, turns=turns, tools=tools)

    def encode(self, hidden: str, spans: list[Span]) -> Pieces | None:
        """Encode a rendered text with marks, and find the spans again in the text without.

        None where the tokenizer does not encode pieces as it encodes the whole, or finds a control token
        in the bare words all the same.
        """
        whole = self.backend.encode(hidden, add_special_tokens=False).ids
        leads = (lead for lead in ("", "\n") if self._by_pieces(hidden, lead, plain=True).ids == whole)
        lead = next(leads, None)
        if lead is None:
            return None
        pieces = self._by_pieces(hidden, lead, plain=False)
        own = sum(number in self.control_ids for number in whole)
        if sum(number in self.control_ids for number in pieces.ids) != own:
            return None
        pieces.spans = [(self._shown(hidden, a), self._shown(hidden, b)) for a, b in spans]
        return pieces

    def show(self, hidden: str) -> str:
        """Put the words back in place of the marks."""
        return MARKS.sub(lambda mark: self._word(mark.group()), hidden)

    def _hide_turn(self, turn: dict[str, Any]) -> dict[str, Any]:
        pattern = self.in_answers if turn["role"] == "assistant" else self.anywhere
        return {
            name: value if name in UNTOUCHED else _map(value, pattern, self.marks)
            for name, value in turn.items()
        }

    def _word(self, mark: str) -> str:
        place = ord(mark) - FIRST_MARK
        return self.words[place] if place < len(self.words) else mark

    def _shown(self, hidden: str, position: int) -> int:
        """Where a position of the text with marks lies in the text without."""
        return len(self.show(hidden[:position]))

    def _by_pieces(self, hidden: str, lead: str, *, plain: bool) -> Pieces:
        """Encode piece by piece; `lead` keeps a tokenizer from taking a piece for the start of a text."""
        result = Pieces()
        position = 0
        cut = len(self.bare.encode(lead, add_special_tokens=False).ids)
        while position < len(hidden):
            token = self.tokens.search(hidden, position)
            end = token.start() if token else len(hidden)
            piece = hidden[position:end]
            swallowed = ""
            if token and self.added[token.group()].lstrip:
                piece, swallowed = piece.rstrip(), piece[len(piece.rstrip()) :]
            if piece:
                piece = piece if plain else self.show(piece)
                first = lead if position else ""
                encoded = self.bare.encode(first + piece, add_special_tokens=False)
                result.add(encoded, len(first), cut if first else 0, piece)
            if token is None:
                break
            position = token.end()
            if self.added[token.group()].rstrip:
                position += len(hidden[position:]) - len(hidden[position:].lstrip())
            result.add_token(self.ids[token.group()], swallowed + hidden[token.start() : position])
        return result


def _map(value: Any, pattern: re.Pattern[str], marks: dict[str, str]) -> Any:
    """Hide control words in every text of a nested value."""
    if isinstance(value, str):
        return pattern.sub(lambda match: marks[match.group()], value)
    if isinstance(value, list):
        return [_map(entry, pattern, marks) for entry in value]
    if isinstance(value, dict):
        return {_map(key, pattern, marks): _map(entry, pattern, marks) for key, entry in value.items()}
    return value


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of the words, the longest where several fit; thousands cost no more than few."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return re.compile(_branches(tree) or r"(?!)")


def _branches(node: dict[str, Any]) -> str:
    options = [re.escape(letter) + _branches(below) for letter, below in node.items() if letter]
    if not options:
        return ""
    joined = options[0] if len(options) == 1 and "" not in node else f"(?:{'|'.join(options)})"
    return f"{joined}?" if "" in node else joined
