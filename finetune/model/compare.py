"""Holds a written model against its source: the same logits, the same answer, computed in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from finetune.model.float32 import in_float32
from finetune.model.reopen import Check

ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 32 * 2**-8, torch.float16: 32 * 2**-11}
"""Largest difference of two logits as a share of the largest one, by the dtype that weights are rounded to.

Rounding moves a weight by up to 2**-9 of itself (bfloat16) or 2**-12 (float16). Where an adapter's update is
smaller than that, the errors of a layer point the same way, against the update, and add up over the layers:
2.5 of 41.7 (16 units of 2**-8) after twenty steps of QLoRA on SmolLM2-135M, where float16 gave 0.05. Twice
that is allowed. What rounding cannot excuse is held to float32's own noise, the order of additions.
"""

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write one sentence about the sea.",
    "Explain in simple words why the sky is blue.",
    "List three colours and three animals.",
)
"""What is asked where the run has no rows of its own."""

LONGEST_PROMPT = 64
ANSWER_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Prompts:
    """A fixed batch: rows that are read, and one that is answered."""

    rows: list[list[int]]
    question: list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens chosen greedily, and the logits that each was chosen by."""

    tokens: list[int]
    logits: torch.Tensor


def fixed_prompts(tokenizer: PreTrainedTokenizerBase, samples: list[dict[str, Any]]) -> Prompts:
    """The run's first rows as it rendered them, else a few questions in the model's own format."""
    texts, question = [sample["text"] for sample in samples], ""
    for sample in samples[:1]:
        learnt = sample["supervised_text"]
        question = sample["text"].partition(learnt[0])[0] if learnt else sample["text"]
    if not texts and tokenizer.chat_template:
        asked = [[{"role": "user", "content": text}] for text in PROMPTS]
        texts = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    texts = texts or list(PROMPTS)
    rows = [_ids(tokenizer, text)[:LONGEST_PROMPT] for text in texts]
    question_ids = _ids(tokenizer, question or texts[0])[-LONGEST_PROMPT:]
    return Prompts([row for row in rows if row], question_ids)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def read(model: PreTrainedModel | PeftModel, prompts: Prompts, *, merged: bool = False) -> torch.Tensor:
    """The logits of every position of every row, on the CPU; `merged`: as if the adapter were merged."""
    longest = max(map(len, prompts.rows))
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in prompts.rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in prompts.rows])
    with in_float32(model, merged=merged):
        logits = model(input_ids=padded.to(model.device), attention_mask=mask.to(model.device)).logits
    return logits.cpu()[mask.bool()]


def answer(model: PreTrainedModel | PeftModel, prompts: Prompts) -> Answer:
    """What the model says to the question, always choosing the likeliest token."""
    asked = torch.tensor([prompts.question], device=model.device)
    greedy = GenerationConfig(
        do_sample=False,
        max_new_tokens=ANSWER_TOKENS,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=model.generation_config.pad_token_id or 0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    with in_float32(model):
        said = model.generate(
            input_ids=asked, attention_mask=torch.ones_like(asked), generation_config=greedy
        )
    return Answer(said.sequences[0, asked.shape[1] :].tolist(), torch.cat(said.logits).float().cpu())


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest absolute difference of two logits; infinite when one of them is no number."""
    difference = (one - other).abs().max().item()
    return difference if difference == difference else float("inf")


def same_logits(name: str, source: torch.Tensor, other: torch.Tensor, rounded_to: torch.dtype) -> Check:
    largest = source.abs().max().item()
    difference, allowed = apart(source, other), ALLOWED[rounded_to] * largest
    why = "order of additions" if rounded_to is torch.float32 else f"rounding to {str(rounded_to)[6:]}"
    detail = f"{len(source)} positions, largest difference {difference:.2g}"
    return Check(
        name, difference <= allowed, f"{detail}, allowed {allowed:.2g} for {why}; largest logit {largest:.3g}"
    )


def same_answer(
    source: Answer,
    other: Answer,
    logits: torch.Tensor,
    rounded_to: torch.dtype,
    tokenizer: PreTrainedTokenizerBase,
) -> Check:
    """Equal tokens, or a parting where the source's own two choices were no further apart than rounding."""
    name = "the greedy answer equals the source's"
    text = repr(tokenizer.decode(source.tokens, skip_special_tokens=True))
    if source.tokens == other.tokens:
        return Check(name, True, text)
    pairs = list(zip(source.tokens, other.tokens, strict=False))
    step = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if step is None:
        return Check(name, False, f"{text}, but one of the two answers ends after {len(pairs)} tokens")
    gap = (source.logits[step, pairs[step][0]] - source.logits[step, pairs[step][1]]).item()
    says = repr(tokenizer.decode(other.tokens, skip_special_tokens=True))
    detail = (
        f"{text}, and {says}: they part at token {step + 1}, where the source's logits are {gap:.2g} apart"
    )
    allowed = 2 * ALLOWED[rounded_to] * logits.abs().max().item()  # each of the two may be off
    within = "the greedy answer parts from the source's within rounding"
    return Check(within, gap <= allowed, f"{detail}, allowed {allowed:.2g}")
