"""The tokenizer pads with no token that an answer ends with, and says what is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from finetune.config.schema import ModelConfig
from finetune.errors import UserError
from finetune.model.tokenizer import load_tokenizer, turn_end, unthinking

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Make a model folder whose tokenizer has these added tokens."""

    def make(
        *added: str, template: str | None = CHATML, eos: str = "<|im_end|>", pad: str | None = None
    ) -> Path:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(
            models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[])
        )
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        fast = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            eos_token=eos,
            pad_token=pad,
            additional_special_tokens=["<|im_start|>", *added],
        )
        fast.chat_template = template
        fast.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return make


def load(path: Path | str, template: str | None = None) -> PreTrainedTokenizerFast:
    return load_tokenizer(ModelConfig(name_or_path=str(path), chat_template=template))


def test_turn_end_is_the_token_of_the_template_not_the_end_of_text(folder: Callable[..., Path]) -> None:
    tokenizer = load(folder("<|im_end|>", eos="<|endoftext|>"))
    assert tokenizer.convert_ids_to_tokens(turn_end(tokenizer)) == "<|im_end|>"


def test_without_a_template_the_turn_ends_with_the_end_of_text(folder: Callable[..., Path]) -> None:
    tokenizer = load(folder(template=None, eos="<|endoftext|>"))
    assert tokenizer.convert_ids_to_tokens(turn_end(tokenizer)) == "<|endoftext|>"


def test_own_pad_token_is_kept(folder: Callable[..., Path]) -> None:
    assert load(folder("<mine>", "<|endoftext|>", pad="<mine>")).pad_token == "<mine>"


@pytest.mark.parametrize("pad", [None, "<|im_end|>"])
def test_missing_or_learnt_pad_token_is_replaced_by_an_unused_one(
    folder: Callable[..., Path], pad: str | None
) -> None:
    assert load(folder("<|endoftext|>", pad=pad)).pad_token == "<|endoftext|>"
    assert (
        load(folder("<|endoftext|>", "<|finetune_right_pad_id|>", pad=pad)).pad_token
        == "<|finetune_right_pad_id|>"
    )
    assert load(folder("<|vision_pad|>", pad=pad)).pad_token == "<|vision_pad|>"
    two_ends = folder("<|im_end|>", "<|vision_pad|>", eos="<|endoftext|>", pad=pad)
    assert load(two_ends).pad_token == "<|vision_pad|>"


def test_pad_token_that_ends_answers_is_said_where_nothing_else_is_left(
    folder: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load(folder())
    assert tokenizer.pad_token == "<|im_end|>"
    assert "which also ends an answer" in caplog.text


def test_template_is_taken_from_a_file_or_as_text(folder: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ 'mine' }}<|im_end|>")
    path = folder()
    assert load(path, str(tmp_path / "mine.jinja")).chat_template == "{{ 'mine' }}<|im_end|>"
    assert load(path, "{{ 'text' }}").chat_template == "{{ 'text' }}"
    with pytest.raises(UserError, match=rf"there is no file {tmp_path}/absent\.jinja"):
        load(path, str(tmp_path / "absent.jinja"))


def test_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"there is no folder {tmp_path}/absent"):
        load(tmp_path / "absent")


def test_folder_without_a_tokenizer_is_told_by_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    with pytest.raises(UserError, match=r"(?s)holds: weights\.bin.*needs tokenizer\.json"):
        load(tmp_path)


def test_hub_out_of_reach_is_one_error_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune.hub.reachable", lambda: False)
    with pytest.raises(
        UserError, match=r"(?s)hub cache either, and .* cannot be reached.*give the folder's path"
    ):
        load("owner/name-that-is-not-here")


def test_a_model_trained_without_thoughts_is_served_so(folder: Callable[..., Path]) -> None:
    tokenizer = load_tokenizer(ModelConfig(name_or_path=str(folder())))
    template = "{% for m in messages %}{{ m.content }}{% if m.thinking %}T{% endif %}{% endfor %}"
    template += "{% if enable_thinking is defined and not enable_thinking %}[no]{% else %}[yes]{% endif %}"
    turns = [{"role": "user", "content": "q"}]
    served = unthinking(template)
    assert isinstance(served, str)
    for text, options, said in (
        (template, {}, "q[yes]"),
        (served, {}, "q[no]"),
        (served, {"enable_thinking": True}, "q[yes]"),
        (served, {"enable_thinking": False}, "q[no]"),
    ):
        assert tokenizer.apply_chat_template(turns, chat_template=text, tokenize=False, **options) == said
    assert unthinking("no switch") == "no switch"
