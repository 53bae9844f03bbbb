"""Full saves: the checkpoint's own names, a file at a time, and no tensor lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from finetune.model import export
from finetune.model.export import save_full
from finetune.model.load import checkpoint_class
from tests.tiny_models import SIZES, experts, multimodal


def tied() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))


def stored(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors in a folder."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("build", [tied, experts, multimodal])
def test_names_and_shapes_are_those_of_the_checkpoint(
    build: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    build().bfloat16().save_pretrained(tmp_path / "base")  # type: ignore[operator]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    monkeypatch.setattr(export, "SHARD_BYTES", 20_000)
    (tmp_path / "saved").mkdir()
    written = save_full(model, tmp_path / "saved", torch.bfloat16, is_main=True)
    assert stored(tmp_path / "saved") == stored(tmp_path / "base")
    assert written.shapes == stored(tmp_path / "base")
    assert len(list((tmp_path / "saved").glob("model-*-of-*.safetensors"))) > 1
    assert not list((tmp_path / "saved").glob(".part*"))
    again = checkpoint_class(model.config).from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.bfloat16().float()), name
