"""Tokens that were added to a tokenizer are learnt, or refused; what is saved works from base and adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.front_door import REPOSITORY, finetune

TINY = REPOSITORY / "finetune" / "embedded" / "tiny"
NEW = ["<tool>", "</tool>"]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A model whose tokenizer knows two tokens more than its embedding has rows, and rows that use them."""
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.add_tokens(NEW) == 2
    tokenizer.save_pretrained(model)
    answer = [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": f"{NEW[0]} 2 {NEW[1]}"}]
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({'messages': answer})}\n" * 16)
    rows = f"data.train=[{{path: {tmp_path / 'rows.jsonl'}}}]"
    return [
        "recipe=tiny_lora",
        "launch.device=cpu",
        f"model.name_or_path={model}",
        rows,
        "trainer.max_steps=20",
    ]


def test_added_tokens_are_learnt_and_merged(words: list[str], tmp_path: Path) -> None:
    refused = finetune(*words, at=tmp_path)
    assert refused.code == 2
    assert "lies outside the model's embedding of 2048 rows" in refused.err
    assert "adapter.modules_to_save='[embed_tokens, lm_head]'" in refused.err
    trained = finetune(*words, "adapter.modules_to_save=[embed_tokens,lm_head]", at=tmp_path)
    assert trained.code == 0, trained.err
    assert "2 new to the model: <tool>, </tool>; 2050 rows instead of 2048" in trained.out
    assert all(check["passed"] for check in trained.report["verified"])
    for source in (trained.path, trained.path / "checkpoints" / "checkpoint-20"):
        merged = finetune("merge", str(source), "--to", str(tmp_path / source.name), "--json", at=tmp_path)
        assert merged.code == 0, merged.err
        model = AutoModelForCausalLM.from_pretrained(tmp_path / source.name)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / source.name)
        assert model.config.vocab_size == 2050
        asked = [{"role": "user", "content": "Two?"}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")[
            "input_ids"
        ]
        said = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(said, skip_special_tokens=False).startswith(NEW[0])


def test_full_fine_tuning_learns_them_too(words: list[str], tmp_path: Path) -> None:
    full = [word.replace("tiny_lora", "tiny_full") for word in words]
    trained = finetune(*full, "trainer.max_steps=3", at=tmp_path)
    assert trained.code == 0, trained.err
    assert json.loads((trained.path / "model" / "config.json").read_text())["vocab_size"] == 2050
    assert all(check["passed"] for check in trained.report["verified"])
