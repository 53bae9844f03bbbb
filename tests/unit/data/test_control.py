"""Control words that a text only spells stay letters; any conversation is learnt right, whatever is in it."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from finetune.config.schema import DataConfig
from finetune.data.control import ControlWords
from finetune.data.convert import Example
from finetune.data.encode import Encoder
from finetune.data.prepare import PreparedData
from finetune.errors import UserError
from tests.unit.data.conftest import SPECIALS, TEMPLATES, byte_tokenizer, learnt_runs

Prepare = Callable[..., PreparedData]
SHIPPED = Path(find_spec("trl").submodule_search_locations[0]) / "chat_templates"
SPELLED = "What does <|im_end|>\n<|im_start|>assistant mean?"
WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def ids_of(prepared: PreparedData) -> list[list[int]]:
    return [row["input_ids"] for row in datasets.Dataset.from_file(str(prepared.train))]


def test_spelled_control_words_are_letters_unless_the_user_says_so(
    prepare: Prepare, learnt: Callable[[Path], list[list[str]]]
) -> None:
    start, end = SPECIALS.index("<|im_start|>"), SPECIALS.index("<|im_end|>")
    prepared = prepare([chat(SPELLED, "It ends <|im_end|> a turn."), chat("q", "a")])
    spelled, plain = ids_of(prepared)
    assert (spelled.count(start), spelled.count(end)) == (plain.count(start), plain.count(end)) == (2, 2)
    assert learnt(prepared.train) == [["It ends <|im_end|> a turn.<|im_end|>"], ["a<|im_end|>"]]
    assert "1 rows spell control tokens of the chat template" in "\n".join(prepared.lines)
    as_tokens = prepare([chat(SPELLED, "a"), chat("q", "a")], split_special_tokens=False)
    assert ids_of(as_tokens)[0].count(end) == 3


def test_plain_text_is_taken_for_rendered_unless_the_user_says_so(prepare: Prepare) -> None:
    end = SPECIALS.index("<|im_end|>")
    rendered = [{"text": "<|im_start|>user\nq<|im_end|>"}]
    assert ids_of(prepare(rendered))[0].count(end) == 1
    assert ids_of(prepare(rendered, split_special_tokens=True))[0].count(end) == 0


def test_control_words_inside_tool_calls_and_names_stay_letters() -> None:
    template = (SHIPPED / "qwen3.jinja").read_text(encoding="utf-8")
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    tokenizer = byte_tokenizer(template, special, bos="<|endoftext|>", eos="<|im_end|>", words=WORDS)
    call = {"type": "function", "function": {"name": "say", "arguments": {"text": "<|im_end|></tool_call>"}}}
    turns = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    encoded = Encoder(tokenizer, DataConfig()).encode([Example(0, 1, turns=turns, answers=(1,))])
    assert (encoded.ids == 1).sum() == 2  # <|im_end|> of the question and of the answer
    assert "<|im_end|></tool_call>" in tokenizer.decode(encoded.ids[encoded.learnt])


def test_private_use_characters_of_the_data_are_no_marks(prepare: Prepare, learnt: Any) -> None:
    assert learnt(prepare([chat("q", "icon \U00100002 done")]).train) == [["icon \U00100002 done<|im_end|>"]]
    with pytest.raises(UserError, match="private-use characters"):
        prepare([chat("what is <|im_end|>?", "icon \U00100002 done")])


@pytest.mark.parametrize("kind", ["nfc", "metaspace", "prepend"])
def test_other_kinds_of_tokenizer_keep_spelled_words_apart_or_leave_the_row_out(kind: str) -> None:
    """Either the row is learnt right, or it is counted as inseparable: never a wrong token."""
    tokenizer = byte_tokenizer(TEMPLATES["plain"], SPECIALS, bos="<s>", eos="<|im_end|>")
    backend = tokenizer.backend_tokenizer
    if kind == "nfc":
        backend.normalizer = normalizers.NFC()
    elif kind == "prepend":
        backend.normalizer = normalizers.Prepend("~")
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Metaspace("~", prepend_scheme="first"),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    turns = [
        {"role": "user", "content": "cafe\u0301 and <|im_end|>\n<|im_start|>?"},
        {"role": "assistant", "content": "It ends <|im_end|> cafe\u0301"},
    ]
    encoded = Encoder(tokenizer, DataConfig()).encode([Example(0, 1, turns=turns, answers=(1,))])
    assert len(encoded.rows) + len(encoded.inseparable) == 1
    if len(encoded.rows):
        text = unicodedata.normalize("NFC", tokenizer.decode(encoded.ids[encoded.learnt]))
        assert text.replace("~", " ").strip() == unicodedata.normalize(
            "NFC", "It ends <|im_end|> cafe\u0301<|im_end|>"
        )
        assert (encoded.ids == SPECIALS.index("<|im_end|>")).sum() == 2
    assert len(encoded.rows) == 1 or kind != "nfc"


# Letters, blanks, scripts, and every control word of the templates: what contents are made of.
PIECES = ["a", "Yes.", " ", "\n", "\u00e9", "\u65e5\u672c", "\U0001f642", "{{", "'", "assistant\n", "<", "|>"]
CONTROL = [*SPECIALS, *WORDS]
content = st.lists(st.sampled_from([*PIECES, *CONTROL]), max_size=8).map("".join)
answer = content.map(lambda text: f"x{text}x")
"""An answer keeps its ends: templates may trim them, which test_mask looks at."""


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, str]]:
    turns = [{"role": "system", "content": draw(content)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        turns.append({"role": "user", "content": draw(content)})
        turns.append({"role": "assistant", "content": draw(answer)})
    return turns


@pytest.mark.parametrize("template", ["plain", "markers", "trims", "bos", "qwen2_5", "llama3"])
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(turns=conversations())
def test_exactly_the_answers_and_their_ends_are_learnt_of_any_conversation(
    template: str, turns: list[dict[str, str]]
) -> None:
    encoder, tokenizer, end = ENCODERS[template]
    answers = tuple(place for place, turn in enumerate(turns) if turn["role"] == "assistant")
    encoded = encoder.encode([Example(0, 1, turns=turns, answers=answers)])
    assert not encoded.bad
    assert not encoded.inseparable
    labels = [int(i) if keep else -100 for i, keep in zip(encoded.ids, encoded.learnt, strict=True)]
    learnt = learnt_runs(tokenizer, {"input_ids": encoded.ids.tolist(), "labels": labels})
    assert learnt == [turns[place]["content"] + end for place in answers]
    control = ControlWords(tokenizer).control_ids
    bare = [{**turn, "content": "x"} for turn in turns]
    of_template = tokenizer.apply_chat_template(bare)["input_ids"]
    written = {tokenizer.convert_tokens_to_ids(word) for word in WORDS}
    """An answer may well call a tool or think: these words it has as tokens."""
    pairs = zip(encoded.ids.tolist(), encoded.learnt.tolist(), strict=True)
    own = [number for number, is_learnt in pairs if number in control - (written if is_learnt else set())]
    assert own == [number for number in of_template if number in control]


def _encoder(template: str) -> tuple[Encoder, PreTrainedTokenizerFast, str]:
    text = TEMPLATES.get(template) or (SHIPPED / f"{template}.jinja").read_text(encoding="utf-8")
    special = [*SPECIALS, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>"]
    end = "<|eot_id|>" if template == "llama3" else "<|im_end|>"
    tokenizer = byte_tokenizer(text, special, bos="<s>", eos=end, words=WORDS)
    return Encoder(tokenizer, DataConfig()), tokenizer, end


ENCODERS = {name: _encoder(name) for name in ("plain", "markers", "trims", "bos", "qwen2_5", "llama3")}
