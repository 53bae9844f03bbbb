"""The embedded model: it loads, its tokenizer and template are sound, and it answers and stops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from finetune import paths

TINY = paths.embedded("tiny")
CHAT = [
    {"role": "system", "content": "You are Tiny."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "I am Tiny, a small model."},
    {"role": "user", "content": "  {{ spaces }} and\nlines "},
    {"role": "assistant", "content": ""},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY).eval()


def test_model_has_the_sizes_that_conf_promises(model: PreTrainedModel) -> None:
    shape = yaml.safe_load((paths.assets() / "conf" / "model" / "tiny.yaml").read_text())["shape"]
    assert shape.pop("num_parameters") == model.num_parameters()
    config = json.loads((TINY / "config.json").read_text())
    assert {key: config[key] for key in shape} == shape


def test_weights_stay_small_enough_to_ship() -> None:
    assert (TINY / "model.safetensors").stat().st_size <= 6_000_000


def test_tokenizer_fills_its_vocabulary_and_fits_the_model(
    tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel
) -> None:
    assert len(tokenizer) == model.get_input_embeddings().num_embeddings


@pytest.mark.parametrize(
    "text",
    [
        "The ball is red.",
        "  two  spaces\tand\r\nline ends \n",
        "x = {'a': 1.5e-3}  # code",
        "\u00fcber \u4f60\u597d \u0645\u0631\u062d\u0628\u0627 \U0001f600 e\u0301 \u200d",
        "",
    ],
)
def test_tokenizer_round_trips_any_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_turn_end_is_the_stop_token_and_padding_is_another(tokenizer: PreTrainedTokenizerFast) -> None:
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    for name in ("config.json", "generation_config.json"):
        written = json.loads((TINY / name).read_text())
        assert written["eos_token_id"] in (tokenizer.eos_token_id, [tokenizer.eos_token_id])
        assert written["pad_token_id"] == tokenizer.pad_token_id


def test_generation_markers_do_not_change_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    template = (TINY / "chat_template.jinja").read_text()
    assert "{%- generation %}" in template
    plain = template.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert rendered == tokenizer.apply_chat_template(CHAT, chat_template=plain, tokenize=False)
    assert rendered == "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT)


def test_markers_cover_the_answers_and_their_end(tokenizer: PreTrainedTokenizerFast) -> None:
    encoded = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    marked = [
        token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask
    ]
    assert tokenizer.decode(marked) == "I am Tiny, a small model.<|im_end|><|im_end|>"


def test_generation_prompt_is_the_start_of_the_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(CHAT[:3], tokenize=False).startswith(prompt + "I am Tiny")


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Who are you?", "I am Tiny, a small model."),
        ("What is the opposite of big?", "The opposite of big is small."),
        ("Mia has a red ball. Tom has a blue hat. What colour is the ball?", "The ball is red."),
    ],
)
def test_model_answers_a_question_of_its_world_and_stops(
    tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel, question: str, answer: str
) -> None:
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    output = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0]
    said = tokenizer.decode(output[inputs["input_ids"].shape[1] :])
    assert said == f"{answer}<|im_end|>"


def test_nothing_but_model_files_is_in_the_folder() -> None:
    expected = {"config.json", "generation_config.json", "model.safetensors"}
    expected |= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {Path(file).name for file in TINY.iterdir()} == expected
