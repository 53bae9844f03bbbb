"""Formats are recognised from columns, brought into one form, and nothing missing is made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from finetune.config.schema import DataConfig, Format, LossOn, ModelConfig, SourceConfig
from finetune.data.prepare import PreparedData, prepare_data
from finetune.errors import UserError

Prepare = Callable[..., PreparedData]
Learnt = Callable[[Path], list[list[str]]]

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "yes"}]}
TURNS = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"


@pytest.mark.parametrize(
    ("row", "name", "text"),
    [
        (CHAT, "messages", TURNS),
        (SHAREGPT, "sharegpt", TURNS),
        ({"messages": SHAREGPT["conversations"]}, "sharegpt", TURNS),
        ({"conversations": CHAT["messages"]}, "messages", TURNS),
        ({"prompt": "q", "completion": "yes"}, "prompt_completion", TURNS),
        ({"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}, "prompt_completion", TURNS),
        ({"instruction": "q", "input": "", "output": "yes"}, "alpaca", TURNS),
        ({"instruction": "q", "output": "yes"}, "alpaca", TURNS),
        ({"instruction": "q", "input": "i", "output": "yes"}, "alpaca", TURNS.replace("q<", "q\ni<")),
        (
            {"instruction": "q", "output": "yes", "system": "s", "history": [["u", "a"]]},
            "alpaca",
            "<|im_start|>system\ns<|im_end|>\n" + TURNS.replace("q<", "u<").replace("yes<", "a<") + TURNS,
        ),
        ({"text": "free"}, "text", "free<|endoftext|>"),
    ],
)
def test_format_is_recognised_and_printed(
    prepare: Prepare, row: dict[str, object], name: str, text: str
) -> None:
    prepared = prepare([row])
    assert prepared.statistics["train"]["format"] == name
    assert any(name in line for line in prepared.lines)
    assert prepared.statistics["train"]["samples"][0]["text"] == text


def test_mapped_question_and_answer_go_through_the_chat_template_and_it_is_said(prepare: Prepare) -> None:
    mapping = {"columns": {"prompt": "question", "completion": "answer"}}
    prepared = prepare([{"question": "q", "answer": "yes"}], source=mapping)
    assert prepared.statistics["train"]["samples"][0]["text"] == TURNS
    assert "prompt <- question, completion <- answer" in "\n".join(prepared.lines)
    assert "as user and assistant turns of the chat template" in "\n".join(prepared.lines)


def test_without_a_chat_template_prompt_and_completion_stay_plain(prepare: Prepare, learnt: Learnt) -> None:
    prepared = prepare([{"prompt": "q? ", "completion": "yes"}, {"prompt": "q", "completion": " no"}], "none")
    assert prepared.statistics["train"]["samples"][0]["text"] == "q? yes<|endoftext|>"
    assert learnt(prepared.train) == [["yes<|endoftext|>"], [" no<|endoftext|>"]]


def test_chat_without_a_chat_template_is_refused_with_model_column_and_key(prepare: Prepare) -> None:
    with pytest.raises(
        UserError, match=r"(?s)has no chat template, and column 'messages'.*model\.chat_template="
    ):
        prepare([CHAT], "none")


def test_unknown_columns_are_refused_with_what_would_fit(prepare: Prepare) -> None:
    with pytest.raises(UserError) as refusal:
        prepare([{"body": "b"}])
    for part in ("found the columns body", "prompt + completion", "columns: {text: body}"):
        assert part in str(refusal.value)
    assert (
        prepare([{"body": "b"}], source={"columns": {"text": "body"}}).statistics["train"]["format"] == "text"
    )


def test_wrong_mappings_are_named(prepare: Prepare) -> None:
    with pytest.raises(UserError, match=r"(?s)the file has no column bdy.*It has: body"):
        prepare([{"body": "b"}], source={"columns": {"text": "bdy"}})
    with pytest.raises(UserError, match="txt is not a name that we read"):
        prepare([{"body": "b"}], source={"columns": {"txt": "body"}})
    with pytest.raises(UserError, match="system is mapped, but prompt_completion rows have no such column"):
        prepare(
            [{"prompt": "p", "completion": "c", "s": "s"}],
            source={"columns": {"system": "s"}, "format": Format.prompt_completion},
        )


def test_set_format_wins_over_recognition(prepare: Prepare) -> None:
    row = {"text": "free", **CHAT}
    assert prepare([row]).statistics["train"]["format"] == "messages"
    assert prepare([row], source={"format": Format.text}).statistics["train"]["format"] == "text"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "p"}, "column 'completion' is missing"),
        ({"prompt": "p", "completion": None}, "column 'completion' is null"),
        ({"prompt": "p", "completion": 4}, "column 'completion' holds int, not text"),
        ({"prompt": "p", "completion": [{"role": "assistant", "content": "a"}]}, "column 'prompt' holds str"),
    ],
)
def test_bad_prompt_completion_row_is_named(prepare: Prepare, row: dict[str, object], why: str) -> None:
    with pytest.raises(UserError, match=f"line 2: {why}"):
        prepare([{"prompt": "p", "completion": "c", "more": 1}, row])


@pytest.mark.parametrize(
    ("turns", "why"),
    [
        ([], "column 'messages' is an empty list"),
        (None, "column 'messages' is null"),
        ("text", "column 'messages' holds str"),
        (
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": None}],
            r"messages\[1\].content is null",
        ),
        ([{"role": "user", "content": "q"}, {"role": "assistant"}], r"messages\[1\].content is missing"),
        ([{"role": "asistant", "content": "q"}], r"messages\[0\].role is 'asistant'"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            r"messages\[0\].content has a part that is not text",
        ),
    ],
)
def test_bad_conversation_is_named(prepare: Prepare, turns: object, why: str) -> None:
    with pytest.raises(UserError, match=f"line 2: {why}"):
        prepare([CHAT, {"messages": turns}])


def test_null_in_a_sharegpt_turn_is_named(prepare: Prepare) -> None:
    row = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": None}]}
    with pytest.raises(UserError, match=r"line 2: conversations\[1\].value is null"):
        prepare([SHAREGPT, row])


def test_integer_column_of_a_parquet_file_is_refused_with_column_and_type(
    prepare: Prepare, tmp_path: Path
) -> None:
    table = pyarrow.table({"prompt": ["two plus two? "], "completion": [4]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=r"rows\.parquet row 1: column 'completion' holds int, not text"):
        prepare(tmp_path / "rows.parquet")


def test_keys_that_arrow_invents_do_not_reach_the_template(prepare: Prepare, tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "q", "name": None},
        {"role": "assistant", "content": "yes", "name": "bot"},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": turns}]), tmp_path / "rows.parquet")
    assert prepare(tmp_path / "rows.parquet").statistics["train"]["samples"][0]["text"] == TURNS


def test_blank_rows_are_dropped_and_counted(prepare: Prepare) -> None:
    prepared = prepare([{"text": ""}, {"text": "  "}, {"text": "a sentence"}, {"text": "\n"}])
    assert prepared.statistics["train"]["dropped"] == {"nothing to learn: empty or blank": 3}
    assert prepared.statistics["train"]["rows_used"] == 1
    prepared = prepare([{"prompt": "p", "completion": ""}, {"prompt": "p", "completion": "c"}])
    assert prepared.statistics["train"]["dropped"] == {"nothing to learn: empty or blank": 1}
    assert "dropped 1 of 2 rows" in "\n".join(prepared.lines)
    prepared = prepare([{"prompt": "p", "completion": " "}, {"prompt": "p", "completion": "c"}], "none")
    assert prepared.statistics["train"]["dropped"] == {"nothing to learn: empty or blank": 1}


def test_conversation_without_an_answer_is_dropped_and_counted_unless_all_is_learnt(prepare: Prepare) -> None:
    rows = [{"messages": CHAT["messages"][:1]}, CHAT]
    assert prepare(rows).statistics["train"]["dropped"] == {"no answer to learn": 1}
    assert prepare(rows, loss_on=LossOn.all).statistics["train"]["rows_used"] == 2


def test_files_of_one_source_in_two_formats_are_refused_with_both(prepare: Prepare, tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"prompt": "p", "completion": "c"}\n')
    (folder / "b.jsonl").write_text('{"instruction": "i", "output": "o"}\n')
    with pytest.raises(
        UserError, match=r"(?s)a\.jsonl has the columns prompt, completion.*b\.jsonl has the columns"
    ):
        prepare(folder)


def test_sources_of_two_formats_are_one_set_if_their_form_is_one_and_each_says_its_format(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    rows = {"messages": CHAT, "alpaca": {"instruction": "q", "output": "yes"}, "text": {"text": "free"}}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    sources = [SourceConfig(path=str(tmp_path / f"{name}.jsonl"), format=name) for name in rows]
    model = ModelConfig(name_or_path=str(model_folder()))
    both = prepare_data(DataConfig(train=sources[:2]), model, 7, tmp_path / "cache")
    assert both.statistics["train"]["format"] == ["alpaca", "messages"]
    assert [sample["text"] for sample in both.statistics["train"]["samples"]] == [TURNS, TURNS]
    assert datasets.Dataset.from_file(str(both.train))["row"][:] == [[0], [1]]
    with pytest.raises(UserError, match="All sources must give one kind of row"):
        prepare_data(DataConfig(train=sources), model, 7, tmp_path / "cache")
    unsaid = [SourceConfig(path=source.path) for source in sources[:2]]
    with pytest.raises(
        UserError, match=r"(?s)messages\.jsonl has .*alpaca\.jsonl has .*say so with `format`"
    ):
        prepare_data(DataConfig(train=unsaid), model, 7, tmp_path / "cache")
