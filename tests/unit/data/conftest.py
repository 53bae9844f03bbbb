"""A tiny byte-level tokenizer in a model folder, with the chat templates that the tests choose from."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from finetune.config.schema import DataConfig, ModelConfig, SourceConfig
from finetune.data.prepare import PreparedData, prepare_data

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>", "<s>"]
HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    "none": None,
    "plain": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}" + HEADER,
    "markers": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{{ '\n' }}{% else %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}" + HEADER,
    "trims": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim }}"
    "{{ '<|im_end|>\n' }}{% endfor %}" + HEADER,
    "empty_thought": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if loop.last and m['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}" + HEADER,
    "channels": "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '<|im_start|>assistant<|channel|>final:' + m['content'] }}"
    "{{ '<|endoftext|>' if loop.last else '<|im_end|>' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + ':' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}",
    "marks_less": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{{ 'Well:' }}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}" + HEADER,
    "rewrites": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'] if loop.last else m['content'].split('[/why]')[-1] }}{{ '<|im_end|>\n' }}{% endfor %}"
    + HEADER,
    "bos": "{{ bos_token }}{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
    "endless": "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}",
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a folder with tokenizer and config.json, once for each template."""
    made: dict[tuple[str, bool, int], Path] = {}

    def make(template: str = "markers", *, adds_bos: bool = False, vocab_size: int = 400) -> Path:
        key = (template, adds_bos, vocab_size)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("model")
            _write_tokenizer(made[key], TEMPLATES[template], adds_bos)
            config = {"vocab_size": vocab_size, "max_position_embeddings": 256}
            (made[key] / "config.json").write_text(json.dumps(config))
        return made[key]

    return make


@pytest.fixture
def prepare(model_folder: Callable[..., Path], tmp_path: Path) -> Callable[..., PreparedData]:
    """Prepare files or rows with the template of that name; other names are those of DataConfig."""

    def run(
        rows: Path | str | list[Any],
        template: str = "markers",
        *,
        source: dict[str, Any] | None = None,
        chat_template: str | None = None,
        **options: Any,
    ) -> PreparedData:
        path = _write_rows(tmp_path, rows) if isinstance(rows, list) else rows
        data = DataConfig(
            train=[SourceConfig(path=str(path), **(source or {}))], **{"max_dropped": 0.8, **options}
        )
        model = ModelConfig(name_or_path=str(model_folder(template)), chat_template=chat_template)
        return prepare_data(data, model, 7, tmp_path / "cache")

    return run


@pytest.fixture
def learnt(model_folder: Callable[..., Path]) -> Callable[[Path], list[list[str]]]:
    """Read a prepared split back: the learnt texts of each row, from the labels as they are saved."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder())

    def read(folder: Path) -> list[list[str]]:
        return [learnt_runs(tokenizer, row) for row in datasets.Dataset.from_file(str(folder))]

    return read


def learnt_runs(tokenizer: PreTrainedTokenizerFast, row: dict[str, Any]) -> list[str]:
    """The learnt pieces of a prepared row, decoded; every label is -100 or the token itself."""
    pairs = list(zip(row["input_ids"], row["labels"], strict=True))
    assert all(label in (-100, number) for number, label in pairs)
    groups = itertools.groupby(pairs, key=lambda pair: pair[1] != -100)
    return [tokenizer.decode([number for number, _ in group]) for is_learnt, group in groups if is_learnt]


def _write_rows(folder: Path, rows: list[Any]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def byte_tokenizer(
    template: str | None, special: list[str], *, bos: str, eos: str, words: list[str] | None = None
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with these control tokens; `words` are added tokens that are none."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(special) + 60,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["user assistant answer Green. yes no"] * 3, trainer)
    tokenizer.add_tokens(words or [])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, pad_token=special[0], bos_token=bos
    )
    fast.chat_template = template
    return fast


def _write_tokenizer(folder: Path, template: str | None, adds_bos: bool) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["user assistant answer Green. yes no"] * 3, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 4)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<pad>", bos_token="<s>"
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
