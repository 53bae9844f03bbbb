"""What the processes of an evaluation are told, and where each leaves what it found. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.config.schema import ModelConfig
from finetune.errors import Problem, Refusal
from finetune.inference.subject import BASE, TUNED, Weights
from finetune.model.source import Source, find_source

NLL, TOKENS, RIGHT = range(3)
"""Columns of the figures: summed negative log-likelihood of a row, supervised tokens, those predicted."""


@dataclass(frozen=True, slots=True)
class Job:
    """What every process of an evaluation does; written by the parent as JSON."""

    run: str | None
    model_words: tuple[str, ...]
    base: dict[str, Any] | None
    """The base's ModelConfig."""
    base_inside: bool
    weights: Weights
    rows: str | None
    """The prepared rows; null: only tasks are run."""
    batch_size: int
    questions: tuple[int, ...]
    """The rows that are answered too."""
    max_new_tokens: int
    tasks: tuple[str, ...]

    def save(self, folder: Path) -> None:
        (folder / "job.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Job:
        content = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        lists = {name: tuple(content[name]) for name in ("model_words", "questions", "tasks")}
        return cls(**content | lists | {"weights": Weights(**content["weights"])})

    @property
    def base_model(self) -> ModelConfig | None:
        """The base as it is opened; sizes are for planning."""
        if self.base is None:
            return None
        return ModelConfig(**{key: value for key, value in self.base.items() if key != "shape"})

    @property
    def names(self) -> tuple[str, ...]:
        """The models that are measured, the base first."""
        return (*([BASE] if self.base is not None else []), *([TUNED] if self.run is not None else []))

    def find_tuned(self) -> Source | None:
        """The tuned model, as the parent found it."""
        if self.run is None:
            return None
        problems: list[Problem] = []
        tuned = find_source(self.run, list(self.model_words), problems)
        if problems:
            raise Refusal(problems, self.run)
        return tuned


def figures_file(folder: Path, name: str) -> Path:
    return folder / f"figures-{name}.npy"


def answers_file(folder: Path, name: str, rank: int) -> Path:
    return folder / f"answers-{name}-{rank:05d}.jsonl"


def answers_files(folder: Path, name: str) -> list[Path]:
    return sorted(folder.glob(f"answers-{name}-*.jsonl"))


def tasks_file(folder: Path, name: str) -> Path:
    return folder / f"tasks-{name}.json"
