"""The model card of a merged model: what it was made from, how, what came out, under which licence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from finetune import hub
from finetune.config.saved import load_config
from finetune.config.schema import RunConfig
from finetune.model.source import Source
from finetune.report.record import read_report


def card_of(source: Source, name: str) -> str:
    """The card for what is merged from `source`, with what its run knows."""
    config = load_config(source.run.config) if source.run is not None else None
    report = read_report(source.run) if source.run is not None and source.run.report.exists() else {}
    base = source.model.name_or_path
    if source.adapter is None and config is not None:
        base = config.model.name_or_path
    folder = Path(base) if Path(base).is_dir() else source.base
    return model_card(name, base, folder, source.method, config, report)


def model_card(
    name: str, base: str, base_folder: Path, method: str, config: RunConfig | None, report: dict[str, Any]
) -> str:
    """README.md for the folder and its page on the hub; local paths are told by their last part alone."""
    of_hub = hub.ID.fullmatch(base) is not None and not Path(base).is_dir()
    licence = _licence(base_folder) or (hub.licence(base) if of_hub else None)
    data = [source.path for source in config.data.train] if config is not None else []
    sets = [path for path in data if hub.ID.fullmatch(path) and not Path(path).exists()]
    front = ["library_name: transformers", "pipeline_tag: text-generation"]
    front += [f"license: {licence}"] if licence else []
    front += [f"base_model: {base}"] if of_hub else []
    front += ["datasets:", *(f"- {path}" for path in dict.fromkeys(sets))] if sets else []
    told = [
        f"- Base: {_shown(base)}",
        f"- Licence of the base: {licence or 'not known here: ask its makers'}",
    ]
    told += [f"- Method: {method}{_settings(config)}"]
    told += ["- Data: " + ", ".join(dict.fromkeys(map(_shown, data)))] if data else []
    return "\n".join(["---", *front, "---", "", f"# {name}", "", *told, *_results(report), ""])


def _licence(folder: Path) -> str | None:
    """`license:` in the front matter of the base's own card."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    found = re.search(r"^license:\s*(\S+)", front.group(1), re.MULTILINE) if front else None
    return found.group(1) if found else None


def _settings(config: RunConfig | None) -> str:
    if config is None:
        return ""
    trainer, adapter = config.trainer, config.adapter
    rank = f", rank {adapter.r}" if adapter.method.value != "full" else ""
    quantised = f", base in {adapter.bits} bits while training" if adapter.method.value == "qlora" else ""
    return f"{rank}{quantised}, learning rate {trainer.learning_rate:g}, seed {config.seed}"


def _results(report: dict[str, Any]) -> list[str]:
    told = []
    if report.get("steps"):
        told.append(
            f"- Trained: {report['steps']:,} steps, {report.get('supervised_tokens', 0):,} learnt tokens"
        )
    if report.get("loss"):
        told.append(
            f"- Training loss: {report['loss']['first']:.4f} at first, {report['loss']['last']:.4f} at last"
        )
    if report.get("eval_loss") is not None:
        told.append(f"- Loss on held-out rows: {report['eval_loss']:.4f}")
    return told


def _shown(path: str) -> str:
    """A hub id, or the last part of a path or an address: nothing of this machine, and no password."""
    if hub.ID.fullmatch(path) and not Path(path).exists():
        return path
    return path.rstrip("/").partition("?")[0].rpartition("/")[2]
