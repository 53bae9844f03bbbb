"""What is learnt decodes to the answers and their end tokens, whatever the template prints around them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from finetune.config.schema import DataConfig, LossOn, ModelConfig, SourceConfig
from finetune.data.prepare import PreparedData, prepare_data
from finetune.errors import UserError

Prepare = Callable[..., PreparedData]
Learnt = Callable[[Path], list[list[str]]]
END = "<|im_end|>"


def chat(*contents: str, system: str | None = None) -> dict[str, Any]:
    turns = [
        {"role": role, "content": text}
        for role, text in zip(itertools.cycle(["user", "assistant"]), contents)
    ]
    return {"messages": ([{"role": "system", "content": system}] if system else []) + turns}


ROWS = [chat("q", "yes"), chat("q", "a", "q", "b", system="s"), chat("a", "a", "a", "a", "a", "a")]
ANSWERS = [["yes"], ["a", "b"], ["a", "a", "a"]]


@pytest.mark.parametrize("template", ["plain", "markers", "marks_less", "trims", "empty_thought", "bos"])
def test_answers_and_their_end_tokens_are_learnt_and_nothing_else(
    prepare: Prepare, learnt: Learnt, template: str
) -> None:
    prepared = prepare(ROWS, template)
    assert learnt(prepared.train) == [[answer + END for answer in answers] for answers in ANSWERS]


def test_what_the_model_must_write_before_its_answer_is_learnt_with_each_turns_own_end(
    prepare: Prepare, learnt: Learnt
) -> None:
    prepared = prepare([chat("q", "a", "q", "b")], "channels")
    assert learnt(prepared.train) == [["<|channel|>final:a<|im_end|>", "<|channel|>final:b<|endoftext|>"]]


@pytest.mark.parametrize("template", ["plain", "markers", "trims", "empty_thought", "bos"])
def test_ids_are_those_of_the_chat_template(
    prepare: Prepare, model_folder: Callable[..., Path], template: str
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder(template))
    rows = datasets.Dataset.from_file(str(prepare(ROWS, template).train))
    for row, source in zip(rows, ROWS, strict=True):
        assert row["input_ids"] == tokenizer.apply_chat_template(source["messages"])["input_ids"]


@pytest.mark.parametrize("template", ["plain", "markers"])
def test_any_text_in_any_script_is_masked_right(prepare: Prepare, learnt: Learnt, template: str) -> None:
    letters = ["a", " ", "\n", "\u00e9", "\u65e5\u672c", "\U0001f642", "e\u0301", "\t", "{{", "'", "yes"]
    draw = random.Random(1)
    texts = ["".join(draw.choices(letters, k=8)) for _ in range(400)]
    pairs = zip(texts[::2], texts[1::2], strict=True)
    rows = [chat(f"{question}{answer}", f"x{answer}", question, f"x{question}") for question, answer in pairs]
    expected = [[turn["content"] + END for turn in row["messages"][1::2]] for row in rows]
    assert learnt(prepare(rows, template).train) == expected


def test_trimmed_answers_are_learnt_as_the_template_prints_them(prepare: Prepare, learnt: Learnt) -> None:
    assert learnt(prepare([chat(" q ", "\n yes ")], "trims").train) == [["yes" + END]]


def test_last_assistant_and_all(prepare: Prepare, learnt: Learnt) -> None:
    assert learnt(prepare(ROWS, "plain", loss_on=LossOn.last_assistant).train) == [
        ["yes" + END],
        ["b" + END],
        ["a" + END],
    ]
    whole = learnt(prepare(ROWS[:1], "plain", loss_on=LossOn.all).train)
    assert whole == [["<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"]]


def test_loss_on_completion_leaves_out_the_history(prepare: Prepare, learnt: Learnt) -> None:
    row = {"instruction": "q", "output": "yes", "history": [["q0", "a0"]]}
    assert learnt(prepare([row], loss_on=LossOn.assistant).train) == [["a0" + END, "yes" + END]]
    assert learnt(prepare([row], loss_on=LossOn.completion).train) == [["yes" + END]]
    with pytest.raises(UserError, match="which have no completion"):
        prepare(ROWS, loss_on=LossOn.completion)


def test_answers_of_a_conversational_prompt_are_not_learnt(prepare: Prepare, learnt: Learnt) -> None:
    turns = chat("q", "a", "q", "b")["messages"]
    assert learnt(prepare([{"prompt": turns[:3], "completion": turns[3:]}]).train) == [["b" + END]]


def test_turns_marked_as_not_to_be_trained_are_left_out(prepare: Prepare, learnt: Learnt) -> None:
    row = chat("q", "a", "q", "b", "q", "c")
    row["messages"][1]["train"] = False
    row["messages"][3]["weight"] = 0
    assert learnt(prepare([row], "plain").train) == [["c" + END]]


def test_template_that_rewrites_earlier_answers_is_refused_with_the_first_row(
    prepare: Prepare, learnt: Learnt
) -> None:
    rows = [chat("q", "yes"), chat("2+2?", "[why]fingers[/why]4", "3+3?", "[why]threes[/why]6")]
    with pytest.raises(UserError, match=r"(?s)line 2: turn 2: .* but as '4.*data\.loss_on=last_assistant"):
        prepare(rows, "rewrites")
    last = prepare(rows, "rewrites", loss_on=LossOn.last_assistant)
    assert learnt(last.train) == [["yes" + END], ["[why]threes[/why]6" + END]]


def test_template_that_never_ends_an_answer_is_refused(prepare: Prepare) -> None:
    with pytest.raises(UserError, match="would never learn to stop"):
        prepare(ROWS, "endless")


def test_row_that_the_template_refuses_is_named(
    prepare: Prepare, tmp_path: Path, model_folder: Callable[..., Path]
) -> None:
    template = tmp_path / "strict.jinja"
    text = "{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"
    template.write_text(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + text
    )
    (tmp_path / "rows.jsonl").write_text("".join(f"{row}\n".replace("'", '"') for row in ROWS))
    model = ModelConfig(name_or_path=str(model_folder()), chat_template=str(template))
    data = DataConfig(train=[SourceConfig(path=str(tmp_path / "rows.jsonl"))])
    with pytest.raises(UserError, match="line 2: the chat template refuses it: no system"):
        prepare_data(data, model, 7, tmp_path / "cache")


def test_one_token_of_blank_and_word_is_learnt_and_said(
    prepare: Prepare, learnt: Learnt, tmp_path: Path, model_folder: Callable[..., Path]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "completion": "answer"}\n')
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|im_end|>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    model = ModelConfig(name_or_path=str(model_folder()), chat_template=template)
    data = DataConfig(train=[SourceConfig(path=str(tmp_path / "rows.jsonl"))])
    prepared = prepare_data(data, model, 7, tmp_path / "cache")
    assert learnt(prepared.train) == [[" answer" + END]]
    assert "1 answers begin within a token" in "\n".join(prepared.lines)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_exactly_one_bos(tmp_path: Path, model_folder: Callable[..., Path], adds_bos: bool) -> None:
    def first_ids(row: str, template: str) -> list[int]:
        (tmp_path / "rows.jsonl").write_text(row)
        model = ModelConfig(name_or_path=str(model_folder(template, adds_bos=adds_bos)))
        data = DataConfig(train=[SourceConfig(path=str(tmp_path / "rows.jsonl"))])
        ids: list[int] = datasets.Dataset.from_file(
            str(prepare_data(data, model, 7, tmp_path / "cache").train)
        )[0]["input_ids"]
        return ids

    bos = 4
    assert first_ids('{"prompt": "p", "completion": "c"}', "bos").count(bos) == 1
    assert first_ids('{"prompt": "p", "completion": "c"}', "none").count(bos) == int(adds_bos)
    assert first_ids('{"text": "free"}', "bos").count(bos) == int(adds_bos)
    assert first_ids('{"text": "<s>free"}', "bos").count(bos) == 1


def test_plain_text_is_learnt_whole_and_ends_once(prepare: Prepare, learnt: Learnt) -> None:
    prepared = prepare([{"text": "free"}, {"text": "ended<|endoftext|>"}])
    assert learnt(prepared.train) == [["free<|endoftext|>"], ["ended<|endoftext|>"]]
    assert "plain text has no roles" in prepared.lines[0]


def test_half_of_a_character_pair_is_a_bad_row(prepare: Prepare, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "fine"}\n{"text": "\\ud83d"}\n')
    with pytest.raises(UserError, match="line 2: holds half of a character pair"):
        prepare(tmp_path / "rows.jsonl")
