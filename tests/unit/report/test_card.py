"""The model card says what a model is made of, and nothing of the machine that made it."""

from __future__ import annotations

from pathlib import Path

from finetune.config.compose import compose
from finetune.report.card import model_card


def test_a_card_names_base_data_method_results_and_licence(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "---\nlicense: apache-2.0\n---\n# Base\nlicense: mit\n", encoding="utf-8"
    )
    rows = tmp_path / "secret place" / "rows.jsonl"
    data = f"[{{path: owner/rows}}, {{path: '{rows}'}}, {{path: 's3://bucket/more.jsonl?x=1'}}]"
    config = compose(["recipe=qwen8b_qlora", f"data.train={data}"]).config
    report = {
        "steps": 1200,
        "supervised_tokens": 34567,
        "loss": {"first": 2.0, "last": 1.25},
        "eval_loss": 1.5,
    }
    card = model_card("mine", "Qwen/Qwen3-8B", tmp_path, "LoRA", config, report)
    front, _, body = card.removeprefix("---\n").partition("\n---\n")
    assert set(front.splitlines()) >= {
        *("license: apache-2.0", "base_model: Qwen/Qwen3-8B", "- owner/rows", "library_name: transformers"),
    }
    for said in (
        "# mine",
        "base in 4 bits",
        "owner/rows, rows.jsonl, more.jsonl",
        "1,200 steps",
        "1.2500",
        "1.5000",
    ):
        assert said in body
    assert not any(word in card for word in (str(tmp_path), "secret", "word@", "x=1"))


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    card = model_card("mine", str(tmp_path), tmp_path, "DoRA", None, {})
    assert "not known here" in card
    assert "base_model" not in card
    assert str(tmp_path) not in card
