"""The figures of a real pretrained model against a plain loop, however the work is shared out.

    FINETUNE_SOAK_MODEL=DIR FINETUNE_SOAK_DATA=FILE make soak

DIR is a folder with a small pretrained chat model (SmolLM2-135M-Instruct was used), FILE a jsonl of
`question` and `answer` rows (GSM8K was used).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.front_door import environment

MODEL, DATA = os.environ.get("FINETUNE_SOAK_MODEL"), os.environ.get("FINETUNE_SOAK_DATA")
ROWS, SAMPLES = 200, 8
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not (MODEL and DATA), reason="set FINETUNE_SOAK_MODEL and FINETUNE_SOAK_DATA"),
]


def evaluated(*words: str, at: Path) -> dict[str, Any]:
    source = f"[{{path: {DATA}, columns: {{prompt: question, completion: answer}}, limit: {ROWS}}}]"
    named = [f"model.name_or_path={MODEL}", f"data.eval={source}", "launch.device=cpu"]
    flags = ["--samples", str(SAMPLES), "--max-new-tokens", "64", "--metric", "final_number", "--json"]
    command = [sys.executable, "-m", "finetune", "evaluate", *named, *words, *flags]
    done = subprocess.run(
        command, cwd=at, env=environment(), capture_output=True, text=True, check=False, timeout=3600
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    (model,) = record["models"]
    assert (model["name"], model["rows"], model["answered"]) == ("base", ROWS, SAMPLES)
    return model


def plain_loop() -> tuple[float, float, int]:
    """Loss, token accuracy and supervised tokens, a row at a time: the answer and the end of its turn."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    total, right, tokens = 0.0, 0, 0
    for line in Path(str(DATA)).read_text(encoding="utf-8").splitlines()[:ROWS]:
        row = json.loads(line)
        asked = [{"role": "user", "content": row["question"]}]
        prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        text = prompt + row["answer"] + "<|im_end|>"
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        before = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, before - 1 : -1]
        wanted = ids[0, before:]
        total += torch.nn.functional.cross_entropy(logits.double(), wanted, reduction="sum").item()
        right += int((logits.argmax(-1) == wanted).sum())
        tokens += len(wanted)
    return total / tokens, right / tokens, tokens


def test_the_real_model_measures_as_a_plain_loop_does_in_any_batches_and_processes(tmp_path: Path) -> None:
    loss, accuracy, tokens = plain_loop()
    ways = [
        ["trainer.per_device_eval_batch_size=1"],
        ["trainer.per_device_eval_batch_size=8"],
        ["trainer.per_device_eval_batch_size=8", "launch.num_processes=2"],
    ]
    found = [evaluated(*words, at=tmp_path) for words in ways]
    for model in found:
        assert model["supervised_tokens"] == tokens
        assert model["loss"] == pytest.approx(loss, abs=1e-4)
        assert model["token_accuracy"] == accuracy
    first = found[0]
    for model in found[1:]:
        assert model["loss"] == pytest.approx(first["loss"], rel=1e-6)
        assert [a["answer"] for a in model["samples"]] == [a["answer"] for a in first["samples"]]
        for metric in ("exact_match", "normalized_match"):
            assert model[metric] == first[metric]
        assert model["metrics"] == first["metrics"]
