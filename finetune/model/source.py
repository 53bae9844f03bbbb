"""What a RUN word names: an adapter on a base model, or a whole model, and whether it is all here; without
torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from finetune import hub
from finetune.config.case import COMMAND_LINE
from finetune.config.overrides import parse_value, split_overrides
from finetune.config.saved import load_config
from finetune.config.schema import Method, ModelConfig, RunConfig
from finetune.config.values import Checker, WrongValue
from finetune.errors import Problem
from finetune.paths import RunDir

WEIGHTS = ("*.safetensors", "*.bin")
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Source:
    """A saved model: where it lies, and the base that an adapter belongs on."""

    folder: Path
    model: ModelConfig
    """How the base of an adapter is opened, or the whole model itself."""
    adapter: dict[str, Any] | None
    """adapter_config.json; null: a whole model."""
    run: RunDir | None
    """The run that it came from, where it still lies in its folder."""
    trained: RunConfig | None = None
    """How a checkpoint was trained: its folder holds the state of training, and no model yet."""

    @property
    def base(self) -> Path:
        """The folder of the base, or of the whole model."""
        return model_folder(self.model)

    @property
    def method(self) -> str:
        """What the weights are, in a word or two."""
        if self.adapter is None:
            return "full fine-tuning" if self.trained is not None else "whole model"
        name = "DoRA" if self.adapter.get("use_dora") else "LoRA"
        return ("rs" if self.adapter.get("use_rslora") else "") + name


def model_folder(model: ModelConfig) -> Path:
    """Where a model's files are; of a hub id, which has been fetched, its snapshot in the cache."""
    folder = Path(model.name_or_path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model.name_or_path, revision=model.revision, local_files_only=True))


def find_source(word: str, overrides: list[str], problems: list[Problem]) -> Source | None:
    """Look at what `word` names; None when it holds no model, which is then among the problems."""
    path = Path(word).expanduser().absolute()
    if not path.is_dir():
        why = f"there is no folder {path}"
        fix = "Give a run's folder, a saved adapter's, or a model's."
        if "=" in word:  # from Python, where the run stands first
            fix += f" From Python a model is named behind the run: (None, {word!r})."
        problems.append(Problem(word, why, fix))
        return None
    run = _run_of(path)
    if run is not None and path.parent == run.checkpoints:
        return _of_checkpoint(path, run, overrides, problems)
    folder = run.model if run is not None and run.path == path else path
    if run is not None and not folder.is_dir():
        problems.append(_unfinished(run))
        return None
    adapter = _read(folder / "adapter_config.json")
    if adapter is None and not (_read(folder / "config.json") and _weights(folder)):
        problems.append(Problem(word, f"{folder} holds no model: {_listing(folder)}", _NO_MODEL))
        return None
    if adapter is not None and not list(folder.glob("adapter_model.*")):
        why = f"{folder} has adapter_config.json, but no weights: {_listing(folder)}"
        problems.append(Problem(word, why, "Copy adapter_model.safetensors there too."))
    if adapter is not None and adapter.get("peft_type") != "LORA":
        why = f"its adapter is of the kind {adapter.get('peft_type')}, which is no change of the weights"
        problems.append(Problem(word, why, "LoRA, rsLoRA, DoRA and QLoRA adapters can be merged."))
    model = load_config(run.config).model if run is not None else ModelConfig(name_or_path="")
    if adapter is None:
        trusted = model.trust_remote_code
        model = ModelConfig(name_or_path=str(folder), trust_remote_code=trusted)
    elif run is None:
        name, revision = adapter.get("base_model_name_or_path") or "", adapter.get("revision")
        model = replace(model, name_or_path=name, revision=revision)
    source = Source(folder, _changed(model, overrides, problems), adapter, run)
    if adapter is not None:
        _check_base(source, problems)
    return source


def _of_checkpoint(path: Path, run: RunDir, overrides: list[str], problems: list[Problem]) -> Source:
    """A checkpoint of any strategy: the model is put together as it was for training."""
    trained = load_config(run.config)
    full = trained.adapter.method is Method.full
    adapter = None if full else {"peft_type": "LORA", **asdict(trained.adapter)}
    source = Source(path, _changed(trained.model, overrides, problems), adapter, run, trained)
    _check_base(source, problems)
    return source


def stored_bytes(source: Source, dtype: str | None) -> int:
    """About how large the whole model is in `dtype`; 0 where its files are not here to be measured."""
    folder = Path(source.model.name_or_path).expanduser()
    config = _read(folder / "config.json") or {}
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    wider = BYTES.get(dtype or stored, 2) / BYTES.get(stored, 2)
    packed = 4 if "quantization_config" in config else 1
    in_full = source.folder.glob("adapter_model.*") if (source.adapter or {}).get("modules_to_save") else ()
    files = [*(_weights(folder) if folder.is_dir() else ()), *in_full]
    return int(sum(file.stat().st_size for file in files) * wider * packed)


_NO_MODEL = "A saved adapter has adapter_config.json, a whole model config.json and *.safetensors."


def _run_of(path: Path) -> RunDir | None:
    """The run whose folder this is, or whose `model/` or checkpoint."""
    places = [path, path.parent if path.name == "model" else None]
    places += [path.parent.parent if path.parent.name == "checkpoints" else None]
    found = (RunDir(place) for place in places if place is not None)
    return next((run for run in found if run.config.is_file()), None)


def _unfinished(run: RunDir) -> Problem:
    report = _read(run.report) or {}
    status = report.get("status")
    states = {None: "it is still running, or was killed", "interrupted": "it was interrupted"}
    why = f"the run has no model yet: {states.get(status, f'it {status}')}"
    if report.get("error"):
        why += f" ({str(report['error']).splitlines()[0]})"
    held = sorted(path.name for path in run.checkpoints.glob("checkpoint-*"))
    fix = "A run's model/ appears when the run is done and its model has passed the checks."
    return Problem(str(run.path), why, f"{fix} Checkpoints: {', '.join(held) or 'none'}.")


def _changed(model: ModelConfig, overrides: list[str], problems: list[Problem]) -> ModelConfig:
    """The model with the `model.*` words of the command line."""
    checker = Checker(COMMAND_LINE, problems)
    for word in split_overrides(overrides, problems):
        if word.path[0] != "model" or len(word.path) != 2:
            why = "a saved model has been trained already, and only where its base is can be said anew"
            problems.append(Problem(f"{word.key} ({COMMAND_LINE})", why, "Use model.name_or_path=DIR."))
            continue
        try:
            accepted = checker.value(word.path, parse_value(word))
        except WrongValue as wrong:
            problems.append(Problem(f"{word.key} ({COMMAND_LINE})", f"expected {wrong}", wrong.fix))
            continue
        if accepted is not None:
            model = replace(model, **{accepted[0][1]: accepted[1]})
    folder = Path(model.name_or_path or "(none)").expanduser()
    return replace(model, name_or_path=str(folder.absolute())) if folder.is_dir() else model


def _check_base(source: Source, problems: list[Problem]) -> None:
    """The base must be here or on a hub within reach, and not stored quantised."""
    name = source.model.name_or_path
    folder = Path(name).expanduser()
    named = f"the base model {name}"
    fix = "Give the folder of the base that the adapter was trained on: model.name_or_path=DIR."
    if not name:
        where = str(source.folder / "adapter_config.json")
        problems.append(Problem(where, "it does not say which model the adapter belongs on", fix))
    elif folder.is_dir():
        config = _read(folder / "config.json")
        weights = _weights(folder) or list(folder.glob("*.gguf"))
        if not weights or (config is None and source.model.gguf_file is None):
            problems.append(Problem(named, f"{folder} holds no model: {_listing(folder)}", fix))
        stored = (config or {}).get("quantization_config", {}).get("quant_method")
        if stored not in (None, "mxfp4"):
            why = (
                f"its weights are stored quantised ({stored}), and merging into them would round the adapter"
            )
            problems.append(
                Problem(named, f"{why} away", "Give its unquantised sister: model.name_or_path=DIR.")
            )
    elif not hub.ID.fullmatch(name):
        at = f"; named in {source.folder / 'adapter_config.json'}" if source.run is None else ""
        problems.append(Problem(named, f"there is no folder {folder.absolute()}{at}", fix))
    elif not hub.cached(name, source.model.revision) and not hub.reachable():
        why = f"there is no folder {folder.absolute()}, it is not in the cache {hub.cache_folder()}, and "
        problems.append(Problem(named, f"{why}{hub.endpoint()} cannot be reached", fix))


def _weights(folder: Path) -> list[Path]:
    return [file for pattern in WEIGHTS for file in folder.glob(pattern)]


def _read(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return content


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") or "it is empty"
