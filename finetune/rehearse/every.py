"""`rehearse --all`: every architecture of conf/model with every method under every strategy, once.

The cases of one architecture share one world of processes, since starting one takes longer than a case: there
a run is trained, gone on with from a checkpoint as if it had been killed behind it, merged and opened again.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import yaml

from finetune.config.compose import compose
from finetune.config.rules import resolve
from finetune.config.saved import save_config
from finetune.config.schema import Method, RunConfig, Strategy
from finetune.config.strategy import TRAITS
from finetune.distributed.family import kill_family
from finetune.distributed.parent import end_with_parent
from finetune.doctor.check import FAIL
from finetune.errors import Problem, Refusal
from finetune.hardware.probe import probe_devices
from finetune.paths import assets
from finetune.rehearse.play import FOLDER, PROCESSES, last_words, package_environment
from finetune.rehearse.rehearsal import SKIP, Stage, Told
from finetune.rehearse.room import LEAST_BYTES, needed_bytes, refuse_small_room
from finetune.rehearse.twin import make_twin
from finetune.rehearse.twin_config import standing_for, twin_config
from finetune.short_lived import short_lived

HANGS_SECONDS = 420.0
"""For one case; the first one under DeepSpeed compiles for about 90 s."""
LISTED = re.compile(r"\[([^\[\]]*)\]")
"""`[a,b]`."""
LAUNCHER = "torch/distributed/elastic"
"""In every line by which torchrun tells of a rank that has ended."""


@dataclass(frozen=True, slots=True)
class Case:
    """One architecture, method and strategy, and the twin's recipe for it."""

    name: str
    recipe: str
    processes: int


def rehearse_all(filters: list[str], told: Told) -> list[Stage]:
    """One `Stage` for each case; what the rules refuse is skipped, with their reason.

    Raises:
        Refusal: words that choose no model, adapter or strategy.
        NoRoom: the disk of TMPDIR is too small.
    """
    models, methods, strategies = _chosen(filters).values()
    names = [_name(*words) for words in product(models, methods, strategies)]
    width = max(map(len, names))
    stages: list[Stage] = []
    for model in models:
        with short_lived(FOLDER) as folder:
            for stage in _stages(model, methods, strategies, folder):
                stages.append(stage)
                told(stage, f"{len(stages):>{len(str(len(names)))}} of {len(names)}  {stage.name:<{width}} ")
    return stages


def _stages(model: str, methods: list[str], strategies: list[str], folder: Path) -> Iterator[Stage]:
    """The cases of one model, those that are skipped first."""
    cases = []
    for case in _cases(model, methods, strategies, folder):
        if isinstance(case, Case):
            cases.append(case)
        else:
            yield case
    for count in sorted({case.processes for case in cases}):
        yield from _in_worlds([case for case in cases if case.processes == count], count, folder)


@cache
def architectures() -> dict[str, str]:
    """One model of conf/model for each architecture (with or without towers): `{its name: the type}`."""
    found: dict[tuple[str, bool], str] = {}
    for file in sorted((assets() / "conf" / "model").glob("*.yaml")):
        shape = yaml.safe_load(file.read_text(encoding="utf-8"))["shape"]
        found.setdefault((shape["model_type"], bool(shape.get("tower_parameters"))), file.stem)
    return {name: kind + (" with towers" if towers else "") for (kind, towers), name in found.items()}


def _chosen(filters: list[str]) -> dict[str, list[str]]:
    """The names of models, methods and strategies, in this order."""
    strategies = [strategy.value for strategy in TRAITS]
    chosen = {"model": list(architectures()), "adapter": list(map(str, Method)), "distributed": strategies}
    known = {**chosen, "model": sorted(file.stem for file in (assets() / "conf" / "model").glob("*.yaml"))}
    problems = []
    for word in filters:
        group, _, value = word.partition("=")
        listed = LISTED.fullmatch(value)
        names = [name.strip() for name in (listed[1] if listed else value).split(",")]
        if group not in known:
            why, fix = f"with --all the words choose from {', '.join(known)}", "Leave it out."
            problems.append(Problem(word, why, fix))
        elif unknown := [name for name in names if name not in known[group]]:
            where = ", ".join(f"{group}={name}" for name in unknown)
            fix = f"NAME or [NAME,NAME], of: {', '.join(known[group])}."
            problems.append(Problem(where, "no such choice", fix))
        chosen[group] = names
    if problems:
        raise Refusal(problems, "rehearse --all")
    return chosen


def _name(model: str, method: str, strategy: str) -> str:
    """As a stage is called: by the architecture, not by the model that stands for it."""
    return f"{architectures().get(model, model)}, {method}, {strategy}"


def _cases(model: str, methods: list[str], strategies: list[str], folder: Path) -> Iterator[Case | Stage]:
    refuse_small_room(folder, LEAST_BYTES)
    config = compose([f"model={model}", "data=alpaca_cleaned"]).config
    standing = standing_for(config)
    twin = make_twin(config.model, standing.tokenizer, folder / "model", config.seed)
    refuse_small_room(folder, needed_bytes(twin.num_parameters, all_trained=Method.full in methods))
    for method in methods:
        config = compose([f"model={model}", "data=alpaca_cleaned", f"adapter={method}"]).config
        for strategy in map(Strategy, strategies):
            processes = 1 if strategy is Strategy.single else PROCESSES
            name = _name(model, method, strategy)
            case = twin_config(config, standing, strategy, processes, folder / "model", folder / "runs")
            refused = _refused(case, processes)
            if refused:
                yield Stage(name, SKIP, 0.0, refused)
                continue
            recipe = folder / f"{method}-{strategy.value}.yaml"
            save_config(replace(case, run_name=None), recipe)
            yield Case(name, str(recipe), processes)


def _refused(config: RunConfig, processes: int) -> str:
    try:
        resolve(config, devices=probe_devices(), world=processes)
    except Refusal as refusal:
        return "; ".join(f"{problem.where}: {problem.why}" for problem in refusal.problems)
    return ""


def _in_worlds(cases: list[Case], processes: int, folder: Path) -> Iterator[Stage]:
    """All cases in one world; behind a case that ends its world the rest goes on in a new one."""
    while cases:
        results = folder / "results.jsonl"
        results.write_text("", encoding="utf-8")
        told = 0
        for line in _world(cases, processes, folder, results):
            yield Stage(**json.loads(line))
            told += 1
        if told < len(cases):
            yield Stage(cases[told].name, FAIL, 0.0, _last_words(folder / "world.log"))
            told += 1
        cases = cases[told:]


def _world(cases: list[Case], processes: int, folder: Path, results: Path) -> Iterator[str]:
    """The lines that rank 0 writes, one for each case that came to its end."""
    todo = folder / "cases.json"
    todo.write_text(json.dumps([asdict(case) for case in cases]), encoding="utf-8")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    worker = ["-m", "finetune.rehearse.every_worker", str(todo), str(results)]
    with (folder / "world.log").open("w", encoding="utf-8") as log:
        world = subprocess.Popen(
            [sys.executable, *torchrun, *worker],
            cwd=folder,
            env=package_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=end_with_parent,
        )
    try:
        seen, since = 0, time.monotonic()
        while True:
            ended = world.poll() is not None
            lines = results.read_text(encoding="utf-8").splitlines()
            for line in lines[seen:]:
                since = time.monotonic()
                yield line
            seen = len(lines)
            if time.monotonic() - since > HANGS_SECONDS:
                with (folder / "world.log").open("a", encoding="utf-8") as log:
                    log.write(f"nothing came of it for {HANGS_SECONDS:.0f} s: it hangs\n")
                return
            if ended:
                return
            time.sleep(0.1)
    finally:
        kill_family(world)


def _last_words(log: Path) -> str:
    """What the ranks said, without what torchrun says of it afterwards."""
    said, _, _ = log.read_text(encoding="utf-8", errors="replace").partition(LAUNCHER)
    return last_words(said) or "it ended without a word"
