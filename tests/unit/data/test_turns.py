"""Tool calls and thoughts, with the templates of real models: read in every shape, learnt as printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from finetune.config.schema import DataConfig, ModelConfig, SourceConfig, Thinking
from finetune.data.prepare import PreparedData, prepare_data
from finetune.errors import UserError
from tests.unit.data.conftest import TEMPLATES, byte_tokenizer, learnt_runs

SHIPPED = Path(find_spec("trl").submodule_search_locations[0]) / "chat_templates"
CHATML = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
END = "<|im_end|>"

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": None}}}
PLAIN = {"name": "add", "arguments": {"a": 2, "b": None}}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]
TALK = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "Four."},
]
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": null}}\n</tool_call><|im_end|>'

Prepare = Callable[..., PreparedData]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("qwen3")
    template = (SHIPPED / "qwen3.jinja").read_text(encoding="utf-8")
    byte_tokenizer(template, CHATML, bos="<|endoftext|>", eos=END, words=WORDS).save_pretrained(at)
    (at / "config.json").write_text(json.dumps({"vocab_size": 1000, "max_position_embeddings": 4096}))
    return at


@pytest.fixture
def learnt(qwen3: Path, tmp_path: Path) -> Callable[..., list[list[str]]]:
    """The learnt texts of rows (or of a file), prepared for Qwen3's own template."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(qwen3)

    def run(rows: list[dict[str, Any]] | Path, **options: Any) -> list[list[str]]:
        file = rows if isinstance(rows, Path) else tmp_path / "rows.jsonl"
        if not isinstance(rows, Path):
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = DataConfig(train=[SourceConfig(path=str(file))], **options)
        prepared = prepare_data(data, ModelConfig(name_or_path=str(qwen3)), 7, tmp_path / "cache")
        return [learnt_runs(tokenizer, row) for row in datasets.Dataset.from_file(str(prepared.train))]

    return run


@pytest.mark.parametrize(
    "call",
    [CALL, PLAIN, json.dumps(PLAIN), {**PLAIN, "arguments": json.dumps(PLAIN["arguments"])}],
    ids=["object", "without function", "as text", "arguments as text"],
)
@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["tools", "tools as text"])
def test_tool_calls_are_learnt_and_results_are_not(
    learnt: Callable[..., list[list[str]]], call: Any, tools: Any
) -> None:
    talk = [TALK[0], {**TALK[1], "content": None, "tool_calls": [call]}, *TALK[2:]]
    no_thought = "Four.<|im_end|>"
    assert learnt([{"messages": talk, "tools": tools}]) == [[CALLED, no_thought]]


def test_sharegpt_tells_the_same_talk_by_its_own_names(learnt: Callable[..., list[list[str]]]) -> None:
    turns = [
        ("human", "2 + 2?"),
        ("function_call", json.dumps(PLAIN)),
        ("observation", "4"),
        ("gpt", "Four."),
    ]
    row = {"conversations": [{"from": who, "value": text} for who, text in turns], "tools": json.dumps(TOOLS)}
    assert learnt([row]) == [[CALLED, "Four.<|im_end|>"]]


def test_arrow_files_give_back_what_was_written_without_invented_keys(
    learnt: Callable[..., list[list[str]]], tmp_path: Path
) -> None:
    other = {"type": "function", "function": {"name": "find", "arguments": {"word": "x"}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    rows = [
        {"messages": [TALK[0], {"role": "assistant", "content": None, "tool_calls": [c]}]}
        for c in (call, other)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    expected = learnt(rows)
    assert expected[0] == ['<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>']
    assert learnt(tmp_path / "rows.parquet") == learnt(tmp_path / "saved") == expected


@pytest.mark.parametrize(
    ("turn", "why"),
    [
        ({"tool_calls": [{"name": "add", "arguments": "{"}]}, "arguments is not valid JSON"),
        ({"tool_calls": [{"arguments": {}}]}, r"tool_calls\[0\] has no name"),
        ({"tool_calls": [{"name": "add", "arguments": [1]}]}, "holds list, not a argument object"),
        ({"reasoning_content": 3}, "reasoning_content holds int, not text"),
        ({"reasoning_content": "a", "thinking": "b"}, "holds two different thoughts"),
    ],
)
def test_bad_calls_and_thoughts_are_named(
    learnt: Callable[..., list[list[str]]], turn: dict[str, Any], why: str
) -> None:
    with pytest.raises(UserError, match=rf"line 1: messages\[1\]\.?.*{why}"):
        learnt([{"messages": [TALK[0], {"role": "assistant", "content": "x", **turn}]}])


THOUGHT = "<think>\nTwo and two.\n</think>\n\n"
ASKED = {"role": "user", "content": "2 + 2?"}
WITH = [ASKED, {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}]
WITHOUT = [ASKED, {"role": "assistant", "content": "Four."}]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking", "in content", "unspaced"])
def test_a_thought_is_learnt_whatever_its_name(learnt: Callable[..., list[list[str]]], name: str) -> None:
    contents = {"in content": f"{THOUGHT}Four.", "unspaced": "<think>Two and two.</think>Four."}
    answer = {"role": "assistant", "content": contents.get(name, "Four.")}
    if name not in contents:
        answer[name] = "Two and two."
    assert learnt([{"messages": [ASKED, answer]}]) == [[f"{THOUGHT}Four.{END}"]]


def test_only_what_the_template_prints_is_learnt_and_an_empty_thought_never(
    learnt: Callable[..., list[list[str]]],
) -> None:
    rows = [{"messages": [*WITH, *WITH]}, {"messages": WITHOUT}]
    assert learnt(rows) == [[f"Four.{END}", f"{THOUGHT}Four.{END}"], [f"Four.{END}"]]


def test_thinking_off_takes_thoughts_out_and_mixed_tells_rows_apart(
    learnt: Callable[..., list[list[str]]], qwen3: Path, tmp_path: Path
) -> None:
    rows = [{"messages": WITH}, {"messages": WITHOUT}]
    assert learnt(rows, thinking=Thinking.off) == [[f"Four.{END}"]] * 2
    told = "{{ 'on ' if enable_thinking is not defined else ('yes ' if enable_thinking else 'no ') }}"
    spoken = (
        told + "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.reasoning_content or '') }}"
    )
    spoken += "{{ m.content + '<|im_end|>' }}{% endfor %}"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = {}
    for thinking in Thinking:
        data = DataConfig(train=[SourceConfig(path=str(tmp_path / "rows.jsonl"))], thinking=thinking)
        model = ModelConfig(name_or_path=str(qwen3), chat_template=spoken)
        samples = prepare_data(data, model, 7, tmp_path / "cache").statistics["train"]["samples"]
        said[thinking] = [sample["text"].split()[0] for sample in samples]
    assert said == {"keep": ["yes", "on"], "mixed": ["yes", "no"], "off": ["no", "no"]}


def test_thoughts_that_the_template_leaves_out_are_counted(qwen3: Path, tmp_path: Path) -> None:
    earlier = {**WITH[1], "reasoning_content": "As before."}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [*WITH, ASKED, earlier]}) + "\n")
    data = DataConfig(train=[SourceConfig(path=str(tmp_path / "rows.jsonl"))])
    prepared = prepare_data(data, ModelConfig(name_or_path=str(qwen3)), 7, tmp_path / "cache")
    assert "1 answers have a thought that the chat template does not print" in "\n".join(prepared.lines)


def test_a_template_without_a_word_for_thoughts_gets_them_in_the_content(
    prepare: Prepare, learnt: Any
) -> None:
    assert learnt_of(prepare([{"messages": WITH}], "plain")) == [f"{THOUGHT}Four.{END}"]
    assert learnt_of(prepare([{"messages": WITH}], "plain", thinking=Thinking.off)) == [f"Four.{END}"]


def learnt_of(prepared: PreparedData) -> list[str]:
    supervised: list[str] = prepared.statistics["train"]["samples"][0]["supervised_text"]
    return supervised


@pytest.mark.parametrize(
    ("template", "learns"),
    [("plain", f"{THOUGHT}Four.{END}"), ("empty_thought", f"{THOUGHT}Four.{END}")],
)
def test_a_thought_whose_opening_tag_is_missing_is_one_too(
    prepare: Prepare, template: str, learns: str
) -> None:
    row = {"messages": [ASKED, {"role": "assistant", "content": "Two and two.\n</think>\n\nFour."}]}
    assert learnt_of(prepare([row], template, thinking=Thinking.off)) == [f"Four.{END}"]


def test_an_empty_thought_in_the_content_is_not_learnt(prepare: Prepare) -> None:
    row = {"messages": [ASKED, {"role": "assistant", "content": "<think>\n\n</think>\n\nFour."}]}
    assert learnt_of(prepare([row], "plain")) == [f"Four.{END}"]


def test_two_different_thoughts_are_a_bad_row(learnt: Callable[..., list[list[str]]]) -> None:
    answer = {"role": "assistant", "content": f"{THOUGHT}Four.", "reasoning_content": "Because."}
    with pytest.raises(UserError, match="line 1: an answer holds two different thoughts"):
        learnt([{"messages": [ASKED, answer]}])


def test_the_word_thinking_in_a_template_is_no_field_for_thoughts(prepare: Prepare, tmp_path: Path) -> None:
    switch = "{# thinking #}{% if enable_thinking is defined and enable_thinking %}{{ '' }}{% endif %}"
    (tmp_path / "t.jinja").write_text(switch + TEMPLATES["plain"])
    rows = [{"messages": WITH}]
    assert learnt_of(prepare(rows, "plain", chat_template=str(tmp_path / "t.jinja"))) == [
        f"{THOUGHT}Four.{END}"
    ]


def test_mixed_needs_a_switch_in_the_template(prepare: Prepare) -> None:
    with pytest.raises(UserError, match="no switch for thoughts"):
        prepare([{"messages": WITH}], "plain", thinking=Thinking.mixed)


def test_calls_that_the_template_does_not_print_are_refused_and_tools_counted(prepare: Prepare) -> None:
    with pytest.raises(
        UserError, match=r"(?s)line 1: turn 2 calls add, and the chat template does not print"
    ):
        prepare([{"messages": TALK}], "plain")
    told = prepare([{"messages": WITHOUT, "tools": TOOLS}], "plain")
    assert "1 rows list tools that the chat template does not print" in told.lines


def test_a_system_column_beside_messages_is_their_first_turn(prepare: Prepare) -> None:
    text = prepare([{"messages": WITHOUT, "system": "Be kind."}], "plain").statistics["train"]["samples"][0][
        "text"
    ]
    assert text.startswith("<|im_start|>system\nBe kind.<|im_end|>")
    twice = [{"role": "system", "content": "Be rude."}, *WITHOUT]
    with pytest.raises(UserError, match="another system turn than column 'system'"):
        prepare([{"messages": twice, "system": "Be kind."}], "plain")


def test_markers_decide_which_answers_are_learnt(prepare: Prepare) -> None:
    template = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    template += "{% if m.role == 'assistant' and loop.last %}{% generation %}{{ m.reasoning_content or '' }}"
    template += "{% endgeneration %}{{ '|' }}{% generation %}{{ m.content }}{% endgeneration %}"
    template += "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    said = learnt_of(prepare([{"messages": [*WITHOUT, *WITH]}], "plain", chat_template=template))
    assert said == [f"Two and two.|Four.{END}"]
