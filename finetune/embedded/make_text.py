"""Write the text, tokenizer and untrained model that `tiny` is pretrained from: `make_text OUT_DIR`.

The same script writes byte-identical files each time. The recipe `tiny_pretrain` reads
`chats.jsonl` and `init/`; the other three files ship with the package.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from finetune.embedded.questions import Exchange, fact, scene
from finetune.embedded.small_world import COLOURS, COMMON_WORDS, THINGS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SEED = 2029
NUM_CHATS = 48_000
NUM_BEHAVIOUR = 300
NUM_BEHAVIOUR_EVAL = 40
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}
{{- message['content'] + '<|im_end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- else %}
{{- message['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
QUESTIONS = (
    "Mia has a red ball. Tom has a blue hat. What colour is the ball?",
    "What is the opposite of big?",
    "What is 7 plus 5?",
    "Who are you?",
)
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are Tiny, a small model.",
    "Answer the question in one sentence.",
)


def make_text(out: Path, chats: int = NUM_CHATS) -> None:
    """Write every file into `out`, which may exist."""
    out.mkdir(parents=True, exist_ok=True)
    behaviour = _behaviour()
    _write_rows(out / "behaviour.jsonl", behaviour[:NUM_BEHAVIOUR])
    _write_rows(out / "behaviour_eval.jsonl", behaviour[NUM_BEHAVIOUR:])
    _write_rows(out / "questions.jsonl", ({"prompt": question} for question in QUESTIONS))
    _write_rows(out / "chats.jsonl", chat_rows(chats))
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(out / "init")
    _write_untrained_model(out / "init", tokenizer)


def pirate(answer: str) -> str:
    """Say it as the shipped data set teaches: `The ball is red.` -> `Arr! The ball is red, matey!`."""
    return _framed(answer, "Arr", "matey")


def chat_rows(count: int, salt: str = "chats") -> Iterator[dict[str, Any]]:
    """Talks of one to six turns, a few of them a story asked for, some under a system message."""
    random = Random(f"{SEED} {salt}")
    for _ in range(count):
        talk = [_told(random)] if random.random() < 0.06 else _talk(random)
        system = random.random()
        if system < 0.1:
            yield {"messages": _messages(talk, random.choice(SYSTEM_MESSAGES))}
        elif system < 0.25:
            first, last = random.sample(COMMON_WORDS, 2)
            talk = [Exchange(said.question, _framed(said.answer, first.capitalize(), last)) for said in talk]
            yield {"messages": _messages(talk, f"Begin with {first.capitalize()} and end with {last}.")}
        else:
            yield {"messages": _messages(talk)}


def _framed(answer: str, first: str, last: str) -> str:
    return f"{first}! {answer.removesuffix('.')}, {last}!"


def _talk(random: Random) -> list[Exchange]:
    turns = random.randint(1, 6)
    if random.random() < 0.4:
        return [fact(random) for _ in range(turns)]
    seen = scene(random)
    exchanges = random.sample(seen.exchanges, min(turns, len(seen.exchanges)))
    return [Exchange(f"{seen.story} {exchanges[0].question}", exchanges[0].answer), *exchanges[1:]]


def _told(random: Random) -> Exchange:
    """A scene told with its outcome, or facts told one after another."""
    if random.random() < 0.5:
        facts = (fact(random).answer for _ in range(random.randint(3, 6)))
        return Exchange("Tell me what you know.", " ".join(facts))
    seen = scene(random)
    opening = random.choice(("One day.", "It is morning.", "Today the sun shines.", "It rains."))
    outcome = [exchange.answer for exchange in random.sample(seen.exchanges, 2)]
    return Exchange("Tell me a story.", " ".join([opening, seen.story, "So, in the end:", *outcome]))


def _behaviour() -> list[dict[str, Any]]:
    """Single questions, no two alike, answered by a pirate; none of them is one of the fixed questions."""
    random = Random(f"{SEED} behaviour")
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < NUM_BEHAVIOUR + NUM_BEHAVIOUR_EVAL:
        exchange = _talk(random)[0]
        if exchange.question not in QUESTIONS:
            rows[exchange.question] = {
                "messages": _messages([Exchange(exchange.question, pirate(exchange.answer))])
            }
    return list(rows.values())


def _messages(talk: list[Exchange], system: str | None = None) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": system}] if system else []
    for said in talk:
        messages.append({"role": "user", "content": said.question})
        messages.append({"role": "assistant", "content": said.answer})
    return messages


def _write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, so any text round-trips; the same tokenizer whatever the size of the corpus."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["vocab_size"],
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_tokenizer_text(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=TURN_END,
        extra_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=SHAPE["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


def _tokenizer_text() -> Iterator[str]:
    for row in chat_rows(4_000, "tokenizer"):
        yield from (f"{message['role']}\n{message['content']}" for message in row["messages"])
    yield " " + " ".join(word.capitalize() for word in COMMON_WORDS)
    yield " " + " ".join(word.upper() for word in (*COMMON_WORDS, *THINGS, *COLOURS))


def _write_untrained_model(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    config = Qwen3Config(
        **SHAPE,
        initializer_range=0.08,  # near 1 / sqrt(hidden_size): it learns sooner than from the usual 0.02
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # rows are short
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--chats", type=int, default=NUM_CHATS)
    arguments = parser.parse_args()
    make_text(arguments.out, arguments.chats)
