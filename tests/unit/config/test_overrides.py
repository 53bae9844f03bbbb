"""What is typed after `key=` arrives as it was typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.config.compose import compose
from finetune.config.saved import load_config, save_config
from finetune.config.schema import RunConfig
from finetune.errors import Refusal

AS_TYPED = [
    "/data/runs/epoch=1-step=2",
    "/data/my set/train file.jsonl",
    "/models/tiny(v2)",
    "Hi, there",
    "a#b",
    "a #b",
    "<|im_end|>",
    "\u6a21\u578b/\u043c\u043e\u0434\u0435\u043b\u044c",
    "'quoted'",
    '"quoted"',
    "it's",
    "C:\\new\\data",
    "[x",
    "{x}",
    "1e5",
    "1_000",
    "007",
    "true",
    "  two blanks",
    "a,b",
    "a: b",
    "$HOME",
    "glob(*)",
    "{{ messages }}\n",
    "~x",
    "&x *y !z %w",
]


def composed(*overrides: str) -> RunConfig:
    return compose(["recipe=tiny_lora", *overrides]).config


@pytest.mark.parametrize("text", AS_TYPED)
def test_text_arrives_as_typed_and_survives_the_saved_file(text: str, tmp_path: Path) -> None:
    config = composed(f"run_name={text}", f"adapter.quant_type={text}")
    save_config(config, tmp_path / "config.yaml")
    again = load_config(tmp_path / "config.yaml")
    assert (config.run_name, config.adapter.quant_type) == (text, text)
    assert (again.run_name, again.adapter.quant_type) == (text, text)


@pytest.mark.parametrize("path", ["/runs/epoch=1/x.jsonl", "/my set/a, b.jsonl", "/tiny(v2)", "/it's"])
def test_a_plain_path_is_a_list_of_one_source(path: str) -> None:
    assert [s.path for s in composed(f"data.train={path}").data.train] == [path]


@pytest.mark.parametrize(
    ("text", "paths", "columns"),
    [
        ("[{path: a b.jsonl, columns: {prompt: question}}]", ["a b.jsonl"], {"prompt": "question"}),
        ("[{path:x.jsonl,columns:{prompt:question}}]", ["x.jsonl"], {"prompt": "question"}),
        ("[{path: /epoch=1/x(1).jsonl}]", ["/epoch=1/x(1).jsonl"], {}),
        ("[{path: '/a, b.jsonl'}]", ["/a, b.jsonl"], {}),
        ("[/x.jsonl,/y.jsonl]", ["/x.jsonl", "/y.jsonl"], {}),
        ("{path: /x.jsonl}", ["/x.jsonl"], {}),
        ("[{path: /\u6a21/<|im_end|>}]", ["/\u6a21/<|im_end|>"], {}),
    ],
)
def test_lists_and_mappings_are_read(text: str, paths: list[str], columns: dict[str, str]) -> None:
    sources = composed(f"data.train={text}").data.train
    assert [s.path for s in sources] == paths
    assert sources[0].columns == columns


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("trainer.learning_rate=1e-4", 1e-4),
        ("trainer.learning_rate='1.0e-5'", None),
        ("trainer.max_steps=20", 20),
        ("trainer.bf16=true", True),
        ("trainer.bf16=null", None),
        ("trainer.pad_to_multiple_of=8", 8),
        ("trainer.pad_to_multiple_of=auto", "auto"),
        ("trainer.include_num_input_tokens_seen=no", "no"),
        ("trainer.include_num_input_tokens_seen=true", True),
        ("trainer.lr_scheduler_kwargs={min_lr: 1e-5}", {"min_lr": 1e-5}),
        ("adapter.target_modules=[q_proj,v_proj]", ["q_proj", "v_proj"]),
        ("adapter.target_modules=.*[.](q|v)_proj", ".*[.](q|v)_proj"),
        ("adapter.init_lora_weights=false", False),
        ("adapter.init_lora_weights=pissa", "pissa"),
        ("+trainer.max_steps=3", 3),
        ("++trainer.max_steps=3", 3),
    ],
)
def test_values_have_the_type_of_their_key(override: str, value: Any) -> None:
    key = override.partition("=")[0].lstrip("+")
    if value is None and "null" not in override:
        with pytest.raises(Refusal, match="expected a number"):
            composed(override)
        return
    group, _, name = key.partition(".")
    assert getattr(getattr(composed(override), group), name) == value


def test_one_item_of_a_list_can_be_set_in_both_spellings() -> None:
    assert composed("data.train.0.limit=5").data.train[0].limit == 5
    assert composed("data.train[0].limit=5").data.train[0].limit == 5
    with pytest.raises(Refusal, match="no such item"):
        composed("data.train.3.limit=5")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_steps=1,2", r"trainer\.max_steps=1,2 \(command line\): expected a whole number"),
        ("trainer.max_steps=1.5", "expected a whole number"),
        ("trainer.learning_rate=high", "expected a number"),
        ("trainer.bf16=maybe", "expected true or false, or null"),
        ("trainer.optim=adamw_8bits", r"Did you mean adamw_8bit\?"),
        ("data.too_long=drp", r"expected one of drop, truncate, error\n.*Did you mean drop\?"),
        ("adapter.modules_to_save=lm_head", r"Write a list: \[lm_head\]"),
        ("adapter.target_modules=q_proj,v_proj", r"Write \[q_proj,v_proj\]"),
        ("data.train=[{path: /a #1.jsonl}]", "expected a list or mapping(.|\n)*in quotes"),
        ("output_dir=null", "expected text"),
        ("trainer.max_steps", "expected key=value"),
        ("~trainer.max_steps", "keys cannot be deleted"),
        ("run_name=${nothing}", "nothing"),
        ("run_name=${broken", r"Write \\\$\{"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_key_value_and_what_to_write(
    override: str, message: str
) -> None:
    with pytest.raises(Refusal, match=message):
        composed(override)
