"""From canonical rows to token ids, each with the mark whether it is learnt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from finetune.config.schema import LossOn
from finetune.data.format import Example
from finetune.data.mask import ChatMask, Span, Unmaskable
from finetune.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(slots=True)
class Encoded:
    """Token ids of many rows, one behind the other."""

    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    learnt: np.ndarray = field(default_factory=lambda: np.empty(0, bool))
    lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    indices: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """0-based place of each row among the rows read."""
    numbers: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """1-based line or row of each in its file."""
    shared_tokens: int = 0
    """Answers whose first token also holds a blank or newline of the template's header."""
    inseparable: list[tuple[int, int]] = field(default_factory=list)
    """(index, number) of rows in which one token holds words of both an answer and the template."""
    bad: list[tuple[int, str, str]] = field(default_factory=list)
    """(number, why, fix) of rows that cannot be encoded."""


class Encoder:
    """Turns canonical rows into ids and learnt marks, for one tokenizer and one `loss_on`."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, loss_on: LossOn) -> None:
        self.tokenizer = tokenizer
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.loss_on = loss_on
        self.chat: ChatMask | None = None
        self.bytes_of = _bytes_of_tokens(tokenizer)
        self.before, self.after = self._ids_around_text()
        self.newline = self._newline_before_completions()

    def encode(self, examples: Sequence[Example]) -> Encoded:
        """Encode rows of one form, all conversations or all plain."""
        if not examples:
            return Encoded()
        rows = _Rows()
        if examples[0].turns is not None:
            self._encode_chats(examples, rows)
        else:
            self._encode_plain(examples, rows)
        return rows.joined()

    def _encode_chats(self, examples: Sequence[Example], rows: _Rows) -> None:
        if self.chat is None:
            self.chat = ChatMask(self.tokenizer)
        texts: list[str] = []
        spans: list[list[Span]] = []
        kept: list[Example] = []
        for example, text in zip(examples, self.chat.render(examples), strict=True):
            try:
                if not isinstance(text, str):
                    raise text
                text.encode()
                where = self.chat.spans(example, text) if self.loss_on is not LossOn.all else [(0, len(text))]
            except UnicodeEncodeError as error:
                rows.bad.append((example.number, f"holds half of a character pair: {error.reason}", ""))
                continue
            except Unmaskable as error:
                rows.bad.append((example.number, str(error), error.fix))
                continue
            except UserError as error:
                rows.bad.append((example.number, str(error), ""))
                continue
            texts.append(text)
            spans.append(where)
            kept.append(example)
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        for example, text, where, encoding in zip(kept, texts, spans, encodings, strict=True):
            ids = encoding.ids
            learnt = self._learnt(ids, text, where, rows)
            if learnt is None:
                rows.inseparable.append((example.index, example.number))
            else:
                rows.add(example, ids, learnt)

    def _learnt(self, ids: list[int], text: str, spans: list[Span], rows: _Rows) -> np.ndarray | None:
        """Mark the tokens of the spans; None where a token holds words of both an answer and the template."""
        starts, ends, letters, spans = self._borders(ids, text, spans)
        learnt = np.zeros(len(ids), bool)
        for start, end in spans:
            first, stop = np.searchsorted(starts, start), np.searchsorted(ends, end, "right")
            if stop == 0 or ends[stop - 1] != end:
                return None
            if first == len(starts) or starts[first] != start:
                first -= 1  # the token that reaches into the answer from the template's text before it
                of_template, of_answer = (
                    letters[starts[first] : start].strip(),
                    letters[start : ends[first]].strip(),
                )
                if of_template and of_answer:
                    return None
                if not of_answer:
                    first += 1
                rows.shared_tokens += 1
            learnt[first:stop] = True
        return learnt

    def _borders(
        self, ids: list[int], text: str, spans: list[Span]
    ) -> tuple[np.ndarray, np.ndarray, bytes | str, list[Span]]:
        """Where tokens start and end, and in what: bytes if the tokens' bytes are known, else characters."""
        table = self.bytes_of
        if table is not None:
            pieces = [table[number] for number in ids]
            letters = text.encode()
            if b"".join(pieces) == letters:
                ends = np.cumsum([len(piece) for piece in pieces])
                starts = ends - [len(piece) for piece in pieces]
                if len(letters) != len(text):
                    spans = [(len(text[:a].encode()), len(text[:b].encode())) for a, b in spans]
                return starts, ends, letters, spans
        offsets = np.array(self.backend.encode(text, add_special_tokens=False).offsets).reshape(-1, 2)
        return offsets[:, 0], offsets[:, 1], text, spans

    def _encode_plain(self, examples: Sequence[Example], rows: _Rows) -> None:
        good = []
        for example in examples:
            try:
                ((example.prompt or "") + example.text).encode()
                good.append(example)
            except UnicodeEncodeError as error:
                rows.bad.append((example.number, f"holds half of a character pair: {error.reason}", ""))
        whole = [example.prompt is None for example in good]
        prompts = self._batch([example.prompt or "" for example in good])
        texts = self._batch(
            [e.text if plain else self.newline + e.text for e, plain in zip(good, whole, strict=True)]
        )
        cut = len(self._batch([self.newline])[0].ids) if self.newline else 0
        for example, plain, prompt, text in zip(good, whole, prompts, texts, strict=True):
            before, ids = prompt.ids, text.ids if plain else text.ids[cut:]
            head = before or ids
            before = before if head[: len(self.before)] == self.before else self.before + before
            tail = self.after if ids[-len(self.after) :] != self.after else []
            learnt = np.ones(len(before) + len(ids) + len(tail), bool)
            if not plain and self.loss_on is not LossOn.all:
                learnt[: len(before)] = False
            rows.add(example, before + ids + tail, learnt)

    def _batch(self, texts: list[str]) -> list[Encoding]:
        encodings: list[Encoding] = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return encodings

    def _ids_around_text(self) -> tuple[list[int], list[int]]:
        """What the tokenizer itself puts before a plain text (a BOS or nothing), and the end after it."""
        bare = self.backend.encode("a", add_special_tokens=False).ids
        full = self.backend.encode("a", add_special_tokens=True).ids
        start = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
        after = full[start + len(bare) :]
        end = self.tokenizer.eos_token_id
        return full[:start], after or ([end] if end is not None else [])

    def _newline_before_completions(self) -> str:
        """Tokenizers that put a blank before every text get a newline first, cut off again afterwards."""
        joined = self._batch(["a"])[0].ids + self._batch(["b"])[0].ids
        return "" if self.tokenizer.decode(joined) == "ab" else "\n"


@dataclass(slots=True)
class _Rows:
    ids: list[int] = field(default_factory=list)
    learnt: list[np.ndarray] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    shared_tokens: int = 0
    inseparable: list[tuple[int, int]] = field(default_factory=list)
    bad: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, example: Example, ids: list[int], learnt: np.ndarray) -> None:
        self.ids += ids
        self.learnt.append(learnt)
        self.lengths.append(len(ids))
        self.indices.append(example.index)
        self.numbers.append(example.number)

    def joined(self) -> Encoded:
        return Encoded(
            np.array(self.ids, np.int32),
            np.concatenate(self.learnt) if self.learnt else np.empty(0, bool),
            np.array(self.lengths, np.int64),
            np.array(self.indices, np.int64),
            np.array(self.numbers, np.int64),
            self.shared_tokens,
            self.inseparable,
            self.bad,
        )


def _bytes_of_tokens(tokenizer: PreTrainedTokenizerFast) -> list[bytes] | None:
    """The bytes of each token; None where the vocabulary does not tell. Each row is checked against it."""
    decoder = str(tokenizer.backend_tokenizer.decoder)
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
    table = [b""] * (max(max(tokenizer.get_vocab().values(), default=0), *added, 0) + 1)
    byte_level = _byte_level_alphabet() if "ByteLevel" in decoder else None
    try:
        for token, number in tokenizer.get_vocab().items():
            if number in added:
                table[number] = added[number].encode()
            elif byte_level is not None:
                table[number] = bytes(byte_level[letter] for letter in token)
            elif byte := BYTE_TOKEN.fullmatch(token):
                table[number] = bytes([int(byte[1], 16)])
            else:
                table[number] = token.replace("\u2581", " ").encode()
    except KeyError:
        return None
    return table


def _byte_level_alphabet() -> dict[str, int]:
    """The letters of a byte-level vocabulary (GPT-2's: printable bytes stand for themselves)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
