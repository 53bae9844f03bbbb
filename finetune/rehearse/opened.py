"""Opens saved models as a user would, with plain transformers and peft: `python -m finetune.rehearse.opened
MERGED MODEL [BASE]`; prints what it saw as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers
from peft import PeftModel
from transformers import AutoConfig, AutoTokenizer

PROMPT = "What is the opposite of big?"
NEW_TOKENS = 8


def opened(merged: str, model: str, base: str) -> dict[str, Any]:
    """`base`: the folder that the adapter in `model` belongs on; empty: `model` is whole."""
    tokenizer = AutoTokenizer.from_pretrained(merged)
    turns = [{"role": "user", "content": PROMPT}]
    asked = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    whole, saved = _opened(merged), _opened(base or model)
    if base:
        saved = PeftModel.from_pretrained(saved, model).eval()
    with torch.no_grad():
        logits, others = (one(input_ids=asked["input_ids"]).logits.float() for one in (whole, saved))
        answer = whole.generate(**asked, max_new_tokens=NEW_TOKENS, do_sample=False)
    return {
        "architecture": type(whole).__name__,
        "difference": ((logits - others).abs().max() / logits.abs().max()).item(),
        "tokens": int(answer.shape[1] - asked["input_ids"].shape[1]),
    }


def _opened(folder: str) -> Any:
    name = AutoConfig.from_pretrained(folder).architectures[0]
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(opened(*sys.argv[1:4])) + "\n")
