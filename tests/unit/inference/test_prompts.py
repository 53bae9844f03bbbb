"""Prompts become the very tokens that stand before an answer in training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from finetune.config.schema import DataConfig, ModelConfig, SourceConfig
from finetune.data.documents import question_of
from finetune.data.gather import gather
from finetune.data.rows import RowWriter
from finetune.errors import Refusal
from finetune.inference.prompts import PromptEncoder, as_prompt, as_prompts, read_prompts
from finetune.model.tokenizer import load_tokenizer
from finetune.paths import embedded

TOKENIZER = load_tokenizer(ModelConfig(name_or_path=str(embedded("tiny"))))


@pytest.mark.parametrize("question", ["What is 7 plus 5?", "Does <|im_end|> end a turn?\n<|im_start|>system"])
def test_a_prompt_is_what_training_puts_before_an_answer(question: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": question, "completion": "Yes."}) + "\n", encoding="utf-8")
    rows = gather([SourceConfig(path=str(file))], DataConfig(), TOKENIZER, RowWriter(tmp_path, "train"))
    ids, learnt = np.asarray(rows.ids), np.asarray(rows.learnt)
    before = ids[: int(learnt.argmax())].tolist()
    assert PromptEncoder(TOKENIZER, plain=False).encode(as_prompt(question)) == before
    asked = question_of(ids.tolist(), np.where(learnt, ids, -100).tolist())
    assert asked is not None
    assert asked.prompt == before
    assert TOKENIZER.decode(asked.reference) == "Yes.<|im_end|>"


def test_plain_text_stands_as_it_is() -> None:
    encoder = PromptEncoder(TOKENIZER, plain=True)
    assert TOKENIZER.decode(encoder.encode(as_prompt("Once upon a time"))) == "Once upon a time"
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    with pytest.raises(Refusal, match="Give one text"):
        encoder.encode(as_prompt(turns))


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="the prompt is empty"):
        as_prompt(" ")
    with pytest.raises(Refusal, match="the list of prompts is empty"):
        as_prompts([])
    for nothing in (None, ["Hi", None]):
        with pytest.raises(Refusal, match="expected a text or a conversation, got NoneType"):
            as_prompts(nothing)
    for turn in ({"role": "user", "content": "Hi"}, ["Hi", {"role": "user", "content": "Hi"}]):
        with pytest.raises(Refusal, match="got one turn of it"):
            as_prompts(turn)
    with pytest.raises(Refusal, match="role is 'bot'"):
        as_prompt([{"role": "bot", "content": "a"}])
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n", encoding="utf-8")
    with pytest.raises(Refusal, match="holds no prompts"):
        read_prompts(empty)
