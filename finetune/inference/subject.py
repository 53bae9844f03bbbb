"""Which models are asked: a run's and its base beside it, where and in which precision. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from finetune import hub
from finetune.config.case import COMMAND_LINE, Case
from finetune.config.compose import Composed, compose
from finetune.config.overrides import split_overrides
from finetune.config.packages import bitsandbytes_problem
from finetune.config.precision import resolve_precision
from finetune.config.rules_launch import choose_device, choose_processes
from finetune.config.schema import (
    AdapterConfig,
    Device,
    DistributedConfig,
    LaunchConfig,
    Method,
    ModelConfig,
    RunConfig,
    ShapeConfig,
)
from finetune.errors import Problem, Refusal
from finetune.hardware.probe import probe_devices
from finetune.model.source import Source, find_source
from finetune.model.tokenizer import TOKENIZER_FILES
from finetune.paths import RunDir

BASE, TUNED = "base", "tuned"

READ = (
    *("model", "data", "seed", "launch.device", "launch.num_processes"),
    *("trainer.per_device_eval_batch_size", "trainer.bf16", "trainer.fp16"),
)
"""The keys, and groups of keys, that mean something where nothing is trained."""

BATCH_SIZE = 8
"""Unless it is typed: without gradients there is room for more rows than a run evaluates at once."""

AS_IT_WAS = ("True", "False", "None", "gaussian", "eva", "orthogonal")
"""Starts of an adapter that leave the weights of the base alone."""


@dataclass(frozen=True, slots=True)
class Weights:
    """In what the weights are held, and where."""

    dtype: str
    """torch's name; of quantised weights what is computed in."""
    device: str
    """`cuda` or `cpu`."""
    bits: int | None = None
    """4 or 8: the base is quantised while it is loaded; null: it is not."""
    quant_type: str = "nf4"
    double_quant: bool = True

    @property
    def quantised(self) -> AdapterConfig:
        """As the config of a quantised base says it."""
        bits = self.bits or 4
        kind, twice = self.quant_type, self.double_quant
        return AdapterConfig(method=Method.qlora, bits=bits, quant_type=kind, double_quant=twice)

    def as_record(self) -> dict[str, Any]:
        """For scripts: how it is quantised is null where it is not in 4 bits."""
        return asdict(self) | ({} if self.bits == 4 else {"quant_type": None, "double_quant": None})


@dataclass(frozen=True, slots=True)
class Subject:
    """One model or two, and what they are asked with."""

    word: str | None
    """The RUN of the command line; null: the keys name a model."""
    model_words: tuple[str, ...]
    """The `model.*` words that it is found with: where the base of an adapter is."""
    tuned: Source | None
    base: ModelConfig | None
    """The model that the tuned one began as; null: it is not known, or not here."""
    base_inside: bool
    """The tuned model is an adapter, and without it is the base."""
    composed: Composed
    config: RunConfig
    weights: Weights
    num_processes: int
    processes_given: bool
    batch_size: int
    """Rows of a forward pass, and prompts that are answered together."""
    lines: tuple[str, ...]
    """What is told of them."""

    @property
    def run(self) -> RunDir | None:
        """The run that the tuned model came from, in its folder."""
        return self.tuned.run if self.tuned is not None else None

    @property
    def names(self) -> tuple[str, ...]:
        """The models that can be asked, the base first."""
        return (*([BASE] if self.base is not None else []), *([TUNED] if self.tuned is not None else []))

    @property
    def speaks(self) -> ModelConfig:
        """The model whose tokenizer and template rows are written with."""
        if self.tuned is None or self.run is not None:
            return self.config.model
        source = self.tuned
        own = any(list(source.folder.glob(pattern)) for pattern in TOKENIZER_FILES[:1])
        place = source.folder if own else source.base
        return replace(source.model, name_or_path=str(place), shape=ShapeConfig())


def find_subject(
    run: str | os.PathLike[str] | None,
    overrides: Sequence[str],
    *,
    bits: int | None = None,
    processes: bool = True,
) -> Subject:
    """Look at what the words name, or refuse them with everything that is wrong.

    `processes`: several may be started; else there is one.
    """
    problems: list[Problem] = []
    words = list(overrides)
    word = os.fspath(run) if run is not None else None
    parted = split_overrides(words, problems)
    model_words = tuple(f"{w.key}={w.raw}" for w in parted if w.path[0] == "model" and len(w.path) > 1)
    problems += _not_read([w.key for w in parted], word)
    # of a whole model the words say what it began as: they are not about its own folder
    of_tuned = () if word is None or _is_whole(word) else model_words
    tuned = find_source(word, list(of_tuned), problems) if word is not None else None
    composed = compose(_words_of_config(tuned, words), problems=problems)
    config = composed.config
    follows = {"data.train is missing"} | ({"model.name_or_path is missing"} if word is not None else set())
    found = [problem for problem in dict.fromkeys(problems) if problem.where not in follows]
    given = composed.provenance
    # any model may be asked on a CPU, and how it was trained says nothing of where it is asked
    launch, spread = _launch_as_typed(config, given), DistributedConfig()
    anywhere = replace(config, model=replace(config.model, cpu=True), launch=launch, distributed=spread)
    case = Case(anywhere, probe_devices(), given, None)
    case.device = choose_device(case)
    case.processes = choose_processes(case) if processes else 1
    precision = resolve_precision(config, case.devices, case.device, case.problems)
    found += case.problems
    if bits is not None:
        found += _bits_problems(bits, tuned)
    if found or (word is not None and tuned is None):
        raise Refusal(found, word or composed.subject)
    base, notes = _base_of(tuned, config, given)
    typed_batch = given.get("trainer.per_device_eval_batch_size") == COMMAND_LINE
    adapter = config.adapter
    weights = Weights(precision.frozen_dtype, case.device, bits, adapter.quant_type, adapter.double_quant)
    held = f"{bits} bits, computed in {precision.compute}" if bits else precision.compute
    lines = [f"weights   {held} on {case.device} ({precision.reason})", *case.notes, *notes]
    return Subject(
        word=word,
        model_words=of_tuned,
        tuned=tuned,
        base=base,
        base_inside=tuned is not None and tuned.adapter is not None and _left_alone(tuned),
        composed=composed,
        config=config,
        weights=weights,
        num_processes=case.processes,
        processes_given=launch.num_processes is not None,
        batch_size=config.trainer.per_device_eval_batch_size if typed_batch else BATCH_SIZE,
        lines=tuple(lines),
    )


def _not_read(keys: list[str], word: str | None) -> list[Problem]:
    problems = []
    for key in keys:
        if word is not None and key in ("recipe", "model"):
            why = f"{word} says which model it is"
            fix = "Leave it out; where its base is: model.name_or_path=DIR."
            problems.append(Problem(f"{key} ({COMMAND_LINE})", why, fix))
        elif key != "recipe" and not any(key == read or key.startswith(f"{read}.") for read in READ):
            known = f"Keys that are read here: {', '.join(['recipe', *READ])}."
            problems.append(Problem(f"{key} ({COMMAND_LINE})", "nothing is trained here", known))
    return problems


def _is_whole(word: str) -> bool:
    seen = find_source(word, [], [])
    return seen is not None and seen.adapter is None and seen.trained is None


def _words_of_config(tuned: Source | None, words: list[str]) -> list[str]:
    """The words of the config: the run's own, or a bare model's, with those of the command line over it."""
    if tuned is None:
        return words
    if tuned.run is not None:
        return [f"recipe={tuned.run.config}", *words]
    known = any(word.lstrip("+").startswith("model.name_or_path=") for word in words)
    name = tuned.model.name_or_path or str(tuned.folder)
    return words if known else [f"model.name_or_path={name}", *words]


def _launch_as_typed(config: RunConfig, given: dict[str, str]) -> LaunchConfig:
    typed = {key for key in ("launch.device", "launch.num_processes") if given.get(key) == COMMAND_LINE}
    return LaunchConfig(
        device=config.launch.device if "launch.device" in typed else Device.auto,
        num_processes=config.launch.num_processes if "launch.num_processes" in typed else None,
    )


def _bits_problems(bits: int, tuned: Source | None) -> list[Problem]:
    where = f"--bits {bits}"
    problems = [Problem(where, "weights can be held in 4 or 8 bits")] if bits not in (4, 8) else []
    missing = bitsandbytes_problem()
    if missing:
        problems.append(Problem(where, missing, "Install it: pip install bitsandbytes"))
    if tuned is not None and tuned.trained is not None:
        why = f"{tuned.folder} is a checkpoint: its weights lie in the state of training, unquantised"
        fix = f"Write them as a model first: finetune merge {tuned.folder}"
        problems.append(Problem(where, why, fix))
    return problems


def _left_alone(source: Source) -> bool:
    """Whether the weights under the adapter are still those of the base."""
    return source.trained is None or str((source.adapter or {}).get("init_lora_weights")) in AS_IT_WAS


def _base_of(
    tuned: Source | None, config: RunConfig, given: dict[str, str]
) -> tuple[ModelConfig | None, list[str]]:
    """What the tuned model began as, where that is known and can be had."""
    if tuned is None:
        return config.model, []
    if tuned.adapter is not None:
        return tuned.model, []
    known = tuned.run is not None or given.get("model.name_or_path") == COMMAND_LINE
    if not known or Path(config.model.name_or_path) == tuned.folder:
        return None, ["base      not compared: the folder does not say what the model began as"]
    name, revision = config.model.name_or_path, config.model.revision
    if Path(name).expanduser().is_dir() or hub.cached(name, revision):
        return config.model, []
    if hub.ID.fullmatch(name) and hub.reachable():
        return config.model, []
    return None, [
        f"base      not compared: there is no {name} here (model.name_or_path=DIR says where it is)"
    ]
