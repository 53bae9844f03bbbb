"""A seeded workload for the benchmarks: a model of about 10 M random weights and 2,000 chats of uneven
length.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

REPOSITORY = Path(__file__).resolve().parents[1]
TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{{ '\n' }}{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_workload(folder: Path, rows: int = 2000, seed: int = 7) -> None:
    """Write `folder/model` and `folder/data/train.jsonl`."""
    chats = [_chat(random.Random(f"{seed}-{number}")) for number in range(rows)]
    (folder / "data").mkdir(parents=True)
    text = "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    (folder / "data" / "train.jsonl").write_text(text, encoding="utf-8")
    tokenizer = _tokenizer(chats)
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder / "model")


def environment(work: Path, **more: str) -> dict[str, str]:
    """What both sides of a pair run in: this checkout, caches of their own, no hub."""
    return {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "FINETUNE_CACHE": str(work / "cache" / "finetune"),
        "HF_HOME": str(work / "cache" / "hf"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "true",
        **more,
    }


def make_tokenizer(folder: Path, seed: int = 7) -> Path:
    """Write a tokenizer whose chat template marks the answers, and the sizes of a model for it."""
    tokenizer = _tokenizer([_chat(random.Random(f"{seed}-{number}")) for number in range(2000)])
    tokenizer.chat_template = MARKED_TEMPLATE
    tokenizer.save_pretrained(folder)
    sizes = {"model_type": "qwen3", "vocab_size": 4096, "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    return folder


def _chat(source: random.Random) -> list[dict[str, str]]:
    """One to three turns; lengths spread as in real chats (log-normal, about 30 to 600 tokens)."""
    words = min(330, max(8, int(source.lognormvariate(4.4, 0.75))))
    turns = 1 if words < 30 else source.choice((1, 1, 2, 3))
    messages = []
    for _ in range(turns):
        asked = max(3, int(words / turns * source.uniform(0.15, 0.45)))
        messages.append({"role": "user", "content": _words(source, asked)})
        answered = max(3, words // turns - asked)
        messages.append({"role": "assistant", "content": _words(source, answered)})
    return messages


def _words(source: random.Random, count: int) -> str:
    """Made-up words of two or three syllables, some far more frequent than others."""
    syllables = ["ka", "lo", "mi", "tra", "ne", "su", "vor", "pel", "di", "gan", "shu", "be"]
    ranks = [min(int(source.paretovariate(0.9)), 1700) for _ in range(count)]
    return " ".join(syllables[r % 12] + syllables[r // 12 % 12] + syllables[r // 144 % 12] for r in ranks)


def _tokenizer(chats: list[list[dict[str, str]]]) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=SPECIALS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    raw.train_from_iterator((message["content"] for chat in chats for message in chat), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=2048
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
