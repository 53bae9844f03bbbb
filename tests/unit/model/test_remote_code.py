"""Code that ships with a checkpoint runs when the user has written so, and never otherwise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from finetune.config.schema import ModelConfig
from finetune.model.load import checkpoint_class, model_config
from finetune.model.tokenizer import load_tokenizer
from finetune.paths import embedded

CODE = """\
from pathlib import Path
from transformers import PretrainedConfig
Path({marker!r}).touch()
class Own(PretrainedConfig):
    model_type = "own"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model with code for its config, its model and its tokenizer."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    shutil.copytree(embedded("tiny"), folder)
    (folder / "own.py").write_text(CODE.format(marker=str(tmp_path / "ran")), encoding="utf-8")
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        classes = ("AutoConfig", "AutoModelForCausalLM") if name == "config.json" else ("AutoTokenizer",)
        content["auto_map"] = {one: ["own.Own", None] if "Tok" in one else "own.Own" for one in classes}
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def of_unknown_type(folder: Path) -> Path:
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**content, "model_type": "own"}), encoding="utf-8")
    return folder


def test_code_of_a_known_architecture_is_not_run(folder: Path) -> None:
    model = ModelConfig(name_or_path=str(folder))
    assert load_tokenizer(model).vocab_size > 0
    assert checkpoint_class(model_config(model)).__module__.startswith("transformers.")
    assert not (folder.parent / "ran").exists()


def test_code_of_an_unknown_architecture_is_refused_by_name_unless_it_is_trusted(folder: Path) -> None:
    path = str(of_unknown_type(folder))
    with pytest.raises(Exception, match="trust_remote_code"):
        model_config(ModelConfig(name_or_path=path))
    assert not (folder.parent / "ran").exists()
    assert model_config(ModelConfig(name_or_path=path, trust_remote_code=True)).model_type == "own"
    assert (folder.parent / "ran").exists()
