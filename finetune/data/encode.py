"""From canonical rows to token ids, each with the mark whether it is learnt."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from finetune.config.schema import DataConfig, LossOn
from finetune.data.control import ControlWords
from finetune.data.convert import Example
from finetune.data.mask import ChatMask, Span, Unmaskable
from finetune.data.turns import tool_name, unprinted_thoughts
from finetune.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

ROW = np.dtype(
    [
        ("length", np.int64),
        ("supervised", np.int64),
        ("prompt", np.int64),
        ("index", np.int64),
        ("number", np.int64),
        ("digest", np.uint64),
    ]
)
"""Of each row: its tokens, those learnt (a first one never is: nothing predicts it), those before the first
learnt one, its 0-based place among the rows read, its 1-based line or row in its file, a hash of its ids.
"""

SHARED = (
    "answers begin within a token that also holds the blank or newline before them (the tokenizer joins the "
    "two); it is learnt if it holds a word of the answer"
)
SPELLED = (
    "rows spell control tokens of the chat template in their contents: read as the letters they are "
    "(data.split_special_tokens=false reads them as the tokens)"
)
AS_TOKENS = (
    "rows of plain text spell control tokens: read as the tokens (data.split_special_tokens=true reads them "
    "as the letters they are)"
)
UNPRINTED_TOOLS = "rows list tools that the chat template does not print"
UNPRINTED = "answers have a thought that the chat template does not print: it is not learnt"


NOT_LEARNT = -100


@dataclass(slots=True)
class Encoded:
    """Token ids of many rows, one behind the other, and what is known of each row."""

    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    learnt: np.ndarray = field(default_factory=lambda: np.empty(0, bool))
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, ROW))
    counts: Counter[str] = field(default_factory=Counter)
    """What is worth telling of these rows, by the sentence that tells it."""
    inseparable: list[tuple[int, int]] = field(default_factory=list)
    """(index, number) of rows in which one token holds words of both an answer and the template."""
    bad: list[tuple[int, str, str]] = field(default_factory=list)
    """(number, why, fix) of rows that cannot be encoded."""


class _Borders(NamedTuple):
    """Where the tokens of a text start and end, and the learnt spans, both counted in `letters`."""

    starts: np.ndarray
    ends: np.ndarray
    letters: bytes | str
    spans: list[Span]


class Encoder:
    """Turns canonical rows into ids and learnt marks, for one tokenizer and the options of `data`."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, data: DataConfig) -> None:
        self.tokenizer = tokenizer
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.loss_on = data.loss_on
        self.split_special_tokens = data.split_special_tokens
        self.control = ControlWords(tokenizer)
        self.chat: ChatMask | None = None
        self.bytes_of = _bytes_of_tokens(tokenizer)
        self.byte_lengths = np.array([len(piece) for piece in self.bytes_of or []], np.int64)
        self.before, self.after = self._ids_around_text()
        self.newline = self._newline_before_completions()

    def encode(self, examples: Sequence[Example]) -> Encoded:
        """Encode rows of one form: all conversations, all plain, or all token ids already."""
        if not examples:
            return Encoded()
        rows = _Rows()
        if examples[0].turns is not None:
            self._encode_chats(examples, rows)
        elif examples[0].ids is not None:
            self._take_ids(examples, rows)
        else:
            self._encode_plain(examples, rows)
        return rows.joined()

    def _encode_chats(self, examples: Sequence[Example], rows: _Rows) -> None:
        if self.chat is None:
            self.chat = ChatMask(self.tokenizer)
        shown, hidden = self._control_words_hidden(examples, rows)
        ready: list[tuple[Example, str, list[Span]]] = []
        for example, text in zip(shown, self.chat.render(shown), strict=True):
            try:
                if not isinstance(text, str):
                    raise text
                text.encode()
                where = self.chat.spans(example, text) if self.loss_on is not LossOn.all else [(0, len(text))]
            except UnicodeEncodeError as error:
                rows.bad.append((example.number, f"holds half of a character pair: {error.reason}", ""))
            except Unmaskable as error:
                rows.bad.append((example.number, str(error), error.fix))
            except UserError as error:
                rows.bad.append((example.number, str(error), ""))
            else:
                ready.append((example, text, where))
        encodings = self.backend.encode_batch_fast([text for _, text, _ in ready], add_special_tokens=False)
        for (example, text, where), encoding in zip(ready, encodings, strict=True):
            if example.index in hidden:
                self._add_by_pieces(example, text, where, rows)
            else:
                self._add_chat(example, text, self._borders(encoding.ids, text, where), encoding.ids, rows)

    def _control_words_hidden(
        self, examples: Sequence[Example], rows: _Rows
    ) -> tuple[list[Example], set[int]]:
        """The examples with control words hidden, and the indices of those that had any."""
        if self.split_special_tokens is False:
            return list(examples), set()
        shown, hidden = [], set()
        for example in examples:
            try:
                shown.append(self.control.hide(example))
            except UserError as error:
                rows.bad.append((example.number, str(error), ""))
                continue
            if shown[-1] is not example:
                hidden.add(example.index)
        return shown, hidden

    def _add_by_pieces(self, example: Example, text: str, spans: list[Span], rows: _Rows) -> None:
        pieces = self.control.encode(text, spans)
        if pieces is None:
            rows.inseparable.append((example.index, example.number))
            return
        borders = _Borders(np.array(pieces.starts), np.array(pieces.ends), pieces.text, pieces.spans)
        rows.counts[SPELLED] += 1
        self._add_chat(example, text, borders, pieces.ids, rows)

    def _add_chat(self, example: Example, text: str, borders: _Borders, ids: list[int], rows: _Rows) -> None:
        learnt = self._learnt(len(ids), borders, rows)
        if learnt is None:
            rows.inseparable.append((example.index, example.number))
            return
        if example.thinking:
            rows.counts[UNPRINTED] += unprinted_thoughts(example.turns or [], text)
        if example.tools and not any(tool_name(tool) in text for tool in example.tools):
            rows.counts[UNPRINTED_TOOLS] += 1
        rows.add(example, ids, learnt)

    def _take_ids(self, examples: Sequence[Example], rows: _Rows) -> None:
        for example in examples:
            ids, labels = example.ids or [], example.labels
            learnt = np.ones(len(ids), bool) if labels is None else np.array(labels) != NOT_LEARNT
            wrong = [number for number in (min(ids), max(ids)) if not 0 <= number < 2**31]
            if wrong:
                rows.bad.append((example.number, f"input_ids holds {wrong[0]}, which is no token", ""))
            else:
                rows.add(example, ids, learnt)

    def _learnt(self, count: int, borders: _Borders, rows: _Rows) -> np.ndarray | None:
        """Mark the tokens of the spans; None where a token holds words of both an answer and the template."""
        starts, ends, letters, spans = borders
        assert len(starts) == count
        learnt = np.zeros(count, bool)
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
                rows.counts[SHARED] += 1
            learnt[first:stop] = True
        return learnt

    def _borders(self, ids: list[int], text: str, spans: list[Span]) -> _Borders:
        """Where tokens start and end, and in what: bytes if the tokens' bytes are known, else characters."""
        table = self.bytes_of
        if table is not None:
            letters = text.encode()
            if b"".join([table[number] for number in ids]) == letters:
                lengths = self.byte_lengths[ids]
                ends = np.cumsum(lengths)
                if len(letters) != len(text):
                    spans = [(len(text[:a].encode()), len(text[:b].encode())) for a, b in spans]
                return _Borders(ends - lengths, ends, letters, spans)
        offsets = np.array(self.backend.encode(text, add_special_tokens=False).offsets).reshape(-1, 2)
        return _Borders(offsets[:, 0], offsets[:, 1], text, spans)

    def _encode_plain(self, examples: Sequence[Example], rows: _Rows) -> None:
        good = []
        for example in examples:
            try:
                ((example.prompt or "") + example.text).encode()
                good.append(example)
            except UnicodeEncodeError as error:
                rows.bad.append((example.number, f"holds half of a character pair: {error.reason}", ""))
        if not self.split_special_tokens:
            spelled = (self.control.anywhere.search((e.prompt or "") + e.text) for e in good)
            rows.counts[AS_TOKENS] += sum(match is not None for match in spelled)
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
        backend = self.control.bare if self.split_special_tokens else self.backend
        encodings: list[Encoding] = backend.encode_batch_fast(texts, add_special_tokens=False)
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
    rows: list[tuple[int, ...]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    inseparable: list[tuple[int, int]] = field(default_factory=list)
    bad: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, example: Example, ids: list[int], learnt: np.ndarray) -> None:
        self.ids += ids
        self.learnt.append(learnt)
        digest = hashlib.blake2b(np.array(ids, np.int32).tobytes(), digest_size=8).digest()
        supervised, prompt = int(learnt[1:].sum()), int(learnt.argmax())
        place = (example.index, example.number)
        self.rows.append((len(ids), supervised, prompt, *place, int.from_bytes(digest, "little")))

    def joined(self) -> Encoded:
        return Encoded(
            np.array(self.ids, np.int32),
            np.concatenate(self.learnt) if self.learnt else np.empty(0, bool),
            np.array(self.rows, ROW),
            self.counts,
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
