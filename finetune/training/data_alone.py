"""What do the rows of a config come to, without a run: counts, tokens, steps, samples?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config.compose import compose
from finetune.config.rules import resolve_rows
from finetune.errors import Problem
from finetune.hardware.probe import probe_devices


@dataclass(frozen=True, slots=True)
class DataAlone:
    """Prepared data, to look at."""

    statistics: dict[str, dict[str, Any] | None]
    """Of `train` and `eval`; null: there is no such split."""
    per_epoch: int
    total: int
    """Optimizer steps."""
    lines: list[str]
    """What is told of all this."""
    page: Path
    """Everything as one HTML page."""

    @property
    def record(self) -> dict[str, Any]:
        """What `finetune prepare --json` prints."""
        return {**self.statistics, "steps": {"per_epoch": self.per_epoch, "total": self.total}}


def prepare_alone(overrides: list[str]) -> DataAlone:
    """Load, check, tokenise, mask, pack, or find all of it in the cache.

    Raises:
        Refusal: the config or a row must be changed first.
    """
    problems: list[Problem] = []
    composed = compose(overrides, problems=problems)
    config = composed.config
    batch = resolve_rows(config, devices=probe_devices(), problems=problems, subject=composed.subject)
    from finetune.data.prepare import cache_root, prepare_data  # the data libraries: after the checks
    from finetune.training.prepare import count_steps, rows_needed

    needed = rows_needed(config.trainer, batch)
    new_tokens = config.adapter.trains_embeddings
    prepared = prepare_data(
        config.data, config.model, config.seed, cache_root(), needed, new_tokens=new_tokens
    )
    steps = count_steps(config.trainer, batch, prepared, composed.subject)
    lines = [*composed.notes, *prepared.lines, batch.line, steps.line]
    return DataAlone(prepared.statistics, steps.per_epoch, steps.total, lines, prepared.page)
