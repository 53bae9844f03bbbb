"""What does config.json in a model's local folder say, and can it be read at all?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.config.case import Lack
from finetune.config.schema import ModelConfig
from finetune.errors import Problem

MOST_NAMES = 12
"""Files of a folder that a message lists."""
COPY_AGAIN = "Copy the file anew from where the model came from."


def stored_config(name_or_path: str) -> dict[str, Any]:
    """The content of config.json; empty where there is none that can be read."""
    content = _read(Path(name_or_path) / "config.json")
    return content if isinstance(content, dict) else {}


def folder_problem(model: ModelConfig) -> Problem | None:
    """Why a folder that is there cannot be opened as a model: every verb reads its config.json."""
    folder = Path(model.name_or_path).expanduser()
    if model.gguf_file is not None or not model.name_or_path or not folder.is_dir():
        return None
    file = folder / "config.json"
    if not file.exists():
        names = sorted(path.name for path in folder.iterdir())
        held = ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
        why = f"the folder has no config.json; it holds: {held or 'nothing'}"
        fix = "Name the folder that a whole model was saved in: config.json, *.safetensors, tokenizer.json."
        return Lack(f"model.name_or_path={model.name_or_path}", why, fix)
    content = _read(file)
    if isinstance(content, str):
        return Lack(str(file), content, COPY_AGAIN)
    return None


def nameless_problem(model: ModelConfig) -> Problem | None:
    """Why the weights of a folder cannot be opened; its tokenizer, which is all that rows need, can."""
    file = Path(model.name_or_path).expanduser() / "config.json"
    content = _read(file) if model.gguf_file is None and file.exists() else ""
    if isinstance(content, str) or "model_type" in content or "auto_map" in content:
        return None
    return Lack(str(file), "it does not say which model this is (model_type)", COPY_AGAIN)


def _read(file: Path) -> dict[str, Any] | str:
    """A mapping, or why there is none, in words."""
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except ValueError as error:
        return f"it is no JSON: {error}" if file.stat().st_size else "it is empty"
    return content if isinstance(content, dict) else f"expected a mapping, got a {type(content).__name__}"
