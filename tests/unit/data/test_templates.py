"""The chat templates that trl ships, against a slow reference: learnt is what the model would write."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from finetune.config.schema import DataConfig, ModelConfig, SourceConfig
from finetune.data.prepare import prepare_data
from tests.unit.data.conftest import byte_tokenizer, learnt_runs

SHIPPED = Path(find_spec("trl").submodule_search_locations[0]) / "chat_templates"
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
ENDS = {
    "qwen2_5": "<|im_end|>",
    "qwen2_5_training": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "qwen3_5_think": "<|im_end|>",
    "qwen3_5_nothink": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "gemma4": "<turn|>",
    "phi3": "<|end|>",
    "phi3_5": "<|end|>",
    "deepseekv3": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "deepseek_r1_distill": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "glm4moe": "<|user|>",
    "gptoss": "<|return|>",
    "cohere2": "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    "lfm2": "<|im_end|>",
    "mistral": "</s>",
}
CONTROL = re.compile(
    r"<[|\uff5c][^<>|\uff5c]*[|\uff5c]>|<(?:start|end)_of_turn>|<\|?turn\|?>|\[/?INST\]|<bos>|</?s>"
)
TEXTS = ["2 + 2?", "Four.", "Sure? a\nb", "Yes, 4.", "\u00e9 \u65e5\u672c", "  x", "No <b>html</b>"]
"""Neither question nor answer holds another one, nor a word of a template."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        template = MISTRAL if name == "mistral" else (SHIPPED / f"{name}.jinja").read_text(encoding="utf-8")
        special = sorted({*CONTROL.findall(template), *CONTROL.findall(ENDS[name]), "<bos>"})
        at = tmp_path_factory.mktemp(name)
        tokenizer = byte_tokenizer(
            template, special, bos="<bos>", eos=CONTROL.findall(ENDS[name])[-1], words=["<think>", "</think>"]
        )
        tokenizer.save_pretrained(at)
        (at / "config.json").write_text(json.dumps({"vocab_size": 1000, "max_position_embeddings": 4096}))
        return at

    return make


def conversations() -> list[list[dict[str, str]]]:
    rows = []
    for length in (2, 4, 6):
        for shift in range(len(TEXTS)):
            contents = [TEXTS[(shift + i) % len(TEXTS)] for i in range(length)]
            roles = itertools.cycle(["user", "assistant"])
            rows.append([{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)])
    return rows


def reference(tokenizer: PreTrainedTokenizerFast, turns: list[dict[str, str]], end: str) -> list[str]:
    """What is learnt of a conversation, one answer at a time, found by putting another text there."""
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    learnt = []
    for place in range(1, len(turns), 2):
        other = [*turns[:place], {"role": "assistant", "content": "ELSEWHERE"}, *turns[place + 1 :]]
        before, after = tokenizer.apply_chat_template(other, tokenize=False).split("ELSEWHERE")
        answer = text[len(before) : len(text) - len(after)]
        stop = CONTROL.search(after)
        ending = (end if after.startswith(end) else after[: stop.end()]) if stop else end
        prompt = tokenizer.apply_chat_template(turns[:place], tokenize=False, add_generation_prompt=True)
        written_first = before.removeprefix(prompt) if before.startswith(prompt) else ""
        if re.search(r"<think>\s*</think>\s*$", before):
            written_first = ""  # an empty thought is given, not learnt
        learnt.append(written_first + answer + ending)
    return learnt


@pytest.mark.parametrize("name", ENDS)
def test_learnt_text_is_what_the_reference_finds(
    name: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    at, rows = folder(name), conversations()
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    data = DataConfig(train=[SourceConfig(path=str(tmp_path / "rows.jsonl"))])
    prepared = prepare_data(data, ModelConfig(name_or_path=str(at)), 7, tmp_path / "cache")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(at)
    saved = datasets.Dataset.from_file(str(prepared.train))
    assert len(saved) == len(rows)
    for row, turns in zip(saved, rows, strict=True):
        learnt = learnt_runs(tokenizer, row)
        assert learnt == reference(tokenizer, turns, ENDS[name]), turns
        assert all(CONTROL.search(text) for text in learnt)
        assert learnt[-1].endswith(ENDS[name])
        ids = tokenizer.apply_chat_template(turns)["input_ids"]
        assert row["input_ids"][: len(ids)] == ids
        assert row["input_ids"].count(tokenizer.bos_token_id) == ids.count(tokenizer.bos_token_id) <= 1
