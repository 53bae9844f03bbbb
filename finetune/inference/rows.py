"""Which rows a model is held against: a run's own held-out ones, or those that the words name. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.config.case import COMMAND_LINE, Case
from finetune.config.devices import Devices
from finetune.config.facts import load_facts
from finetune.config.rules_trainer import check_sources
from finetune.config.schema import DataConfig, SourceConfig
from finetune.data.prepare import cache_root, prepare_data
from finetune.errors import Problem, Refusal, refuse
from finetune.inference.subject import Subject
from finetune.training.prepare import rows_needed

SUBJECT = "the rows"


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The rows, tokenised and masked as for training."""

    file: Path
    """Opens with `datasets.Dataset.from_file`."""
    origin: str
    """The key that names them."""
    statistics: dict[str, Any]
    """As `prepare --json` counts them."""

    @property
    def lines(self) -> list[str]:
        """What is told of them; each dropped row is counted."""
        said = self.statistics
        files = said["files"]
        where = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
        used = (
            f"{said['rows_used']:,} of {said['rows_read']:,} used, {said['supervised_tokens']:,} supervised"
        )
        lines = [f"rows      {used} of {said['tokens']:,} tokens ({self.origin}: {where})"]
        for reason, count in said["dropped"].items():
            first = ", ".join(said["first_dropped"][reason])
            lines.append(f"dropped   {count:,} of {said['rows_read']:,}: {reason} (first: {first})")
        if said["truncated"]:
            lines.append(f"cut       {said['truncated']:,} rows to data.max_length={said['max_length']}")
        return lines

    @property
    def record(self) -> dict[str, Any]:
        """What `--json` says of them."""
        kept = ("files", "rows_read", "rows_used", "dropped", "truncated", "tokens", "supervised_tokens")
        return {"origin": self.origin, **{name: self.statistics[name] for name in kept}}


def held_out_rows(subject: Subject) -> HeldOut | None:
    """Prepare them, or find them in the cache; None where nothing names any.

    Raises:
        Refusal: a source is wrong, or all that is left was trained on.
    """
    config, typed = subject.config, _typed(subject)
    data = config.data
    case = Case(config, Devices(), subject.composed.provenance, None)
    check_sources(case)
    wrong = [problem for problem in case.problems if not problem.where.startswith("data.eval and")]
    if wrong:
        raise Refusal(wrong, SUBJECT)
    if data.eval:
        return _prepared(subject, data.eval, "data.eval")
    if "data.train" in typed and data.train:
        return _prepared(subject, data.train, "data.train")
    if data.eval_fraction and data.train:
        if subject.run is not None and "data.eval_fraction" in typed:
            why = "the run was trained on the rows that this would take"
            raise refuse(
                "data.eval_fraction (command line)", why, "Name others: data.eval=FILE", subject=SUBJECT
            )
        return _split_off(subject)
    if subject.run is None and data.train:
        return _prepared(subject, data.train, "data.train")
    return None


def no_rows(subject: Subject) -> Refusal:
    """Why there is nothing to hold the model against."""
    run = subject.run
    why = f"the run {run.path.name} held out no rows" if run is not None else "no rows are named"
    fix = "Name some: data.eval=FILE (columns as for training: data.eval='[{path: FILE, columns: {...}}]')."
    return Refusal([Problem("data.eval", why, fix)], SUBJECT)


def _typed(subject: Subject) -> set[str]:
    """Keys of `data` that stand on the command line; a file of conf/data there names its rows too."""
    provenance = subject.composed.provenance
    keys = {".".join(key.split(".")[:2]) for key, origin in provenance.items() if origin == COMMAND_LINE}
    picked = subject.composed.choices.get("data") not in (None, "default")
    return keys | ({"data.train"} if picked else set())


def _prepared(subject: Subject, sources: list[SourceConfig], origin: str) -> HeldOut:
    """Every row of the sources, each by itself."""
    plain = [replace(source, weight=None) for source in sources]
    data = replace(
        subject.config.data, train=plain, eval=[], eval_fraction=0.0, packing=False, streaming=False
    )
    prepared = prepare_data(
        data, subject.speaks, subject.config.seed, cache_root(), new_tokens=_new_tokens(subject)
    )
    return HeldOut(prepared.train, origin, prepared.statistics["train"])


def _split_off(subject: Subject) -> HeldOut:
    """The rows that the run itself held out: prepared as it prepared them, they are in the cache."""
    config, run = subject.config, subject.run
    data: DataConfig = config.data
    needed = 0
    if run is not None and data.streaming:
        needed = rows_needed(config.trainer, load_facts(run.facts).batch)
    root = run.path / "data" if run is not None and config.launch.num_machines > 1 else cache_root()
    new_tokens = _new_tokens(subject)
    prepared = prepare_data(data, subject.speaks, config.seed, root, needed, new_tokens=new_tokens)
    assert prepared.eval is not None
    origin = f"data.eval_fraction={data.eval_fraction:g} of data.train"
    return HeldOut(prepared.eval, origin, prepared.statistics["eval"])


def _new_tokens(subject: Subject) -> bool:
    return subject.run is not None and subject.config.adapter.trains_embeddings
