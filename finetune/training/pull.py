"""Brings a run here from a store, to go on with it: written beside its place, verified, renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

from finetune.config.rules import RunFacts
from finetune.config.schema import RunConfig
from finetune.errors import Problem, Refusal, refuse
from finetune.paths import RunDir
from finetune.remote.address import Place, place_of_resume, whole_address
from finetune.remote.store import Store, StoreError, open_store
from finetune.training.checkpoint import (
    MANIFEST,
    Found,
    checksum,
    damage,
    newest_whole,
    read_manifest,
    set_aside,
    step_of,
)
from finetune.training.lock import held
from finetune.training.remote_run import Contents, best_of, contents, lacking
from finetune.training.resume import AUTO, SUBJECT, compare
from finetune.training.retry import Waiting

Say = Callable[[str], None]

RECORDS = (
    "config.yaml",
    "facts.json",
    "environment.json",
    "metrics.jsonl",
    "samples.jsonl",
    "times.jsonl",
    "report.json",
    "tracking.json",
)
"""What going on needs beside the checkpoint."""
NEEDED = ("config.yaml", "facts.json")

ROOM = "Free space there, or set output_dir to a larger disk that can be written."

TRIES = 4
"""Of one file: with waits of seconds between them, before the whole is given up."""


def brought_here(config: RunConfig, facts: RunFacts, say: Say) -> RunConfig:
    """The config with `checkpoint.resume` as it is on this machine, the run having been brought here.

    Nothing is brought if this machine has the checkpoint, or (where none is named) a newer one.
    """
    place = _place(config)
    if place is None or config.launch.num_machines > 1:
        return config
    try:
        checkpoint = _bring(place, config, facts, say)
    except StoreError as error:
        why = f"{place.run} cannot be read: {error}"
        raise refuse(
            f"checkpoint.resume={config.checkpoint.resume}", why, error.fix, subject=SUBJECT
        ) from error
    except OSError as error:
        why = f"{place.run} cannot be brought here: {error.strerror or error}"
        where = str(error.filename or Path(config.output_dir).absolute())
        raise refuse(where, why, ROOM, subject="the disk of this machine") from error
    resume = str(checkpoint) if checkpoint is not None and place.checkpoint is not None else AUTO
    return replace(config, checkpoint=replace(config.checkpoint, resume=resume))


def _place(config: RunConfig) -> Place | None:
    checkpoint = config.checkpoint
    if checkpoint.resume == AUTO and checkpoint.remote is not None and config.run_name is not None:
        return Place(whole_address(checkpoint.remote), config.run_name)
    return place_of_resume(checkpoint.resume, checkpoint.remote)


def _bring(place: Place, config: RunConfig, facts: RunFacts, say: Say) -> Path | None:
    """The folder of the checkpoint on this machine; None: neither it nor the store has one of this run."""
    store, where = open_store(place.store), f"checkpoint.resume={config.checkpoint.resume}"
    there = contents(store, place.run_name)
    run_dir = RunDir(Path(config.output_dir).absolute() / place.run_name)
    wanted = [name for name in reversed(there.whole()) if place.checkpoint in (None, name)]
    if not wanted and config.checkpoint.resume != AUTO:
        what = f"no whole {place.checkpoint or 'checkpoint'}"
        raise refuse(where, f"there is {what} at {place.run}", "Look at the address.", subject=SUBJECT)
    if place.checkpoint is None:
        mine = _newest_here(run_dir)
    else:
        named = run_dir.checkpoints / place.checkpoint
        mine = named if _same(store, place, named) else None
    if mine is not None and wanted and step_of(mine) > step_of(Path(wanted[0])):
        say(f"resume    this machine's {mine.name} is newer than {wanted[0]} at {place.run}")
    wanted = [name for name in wanted if mine is None or step_of(Path(name)) > step_of(mine)]
    if not wanted:
        return mine
    lost = [name for name in NEEDED if name not in there.records]
    if lost:
        raise refuse(place.run, f"{' and '.join(lost)} of the run are not there", subject=SUBJECT)
    beside = RunDir(run_dir.path.with_name(f".{place.run_name}.fetched"))
    beside.path.mkdir(parents=True, exist_ok=True)
    with held(beside):
        _fetch_records(store, place, beside, there.records)
        runs = [run for run in (beside, run_dir) if run.config.exists()]
        problems = [problem for run in runs for problem in compare(config, facts, run).problems]
        if problems:  # nothing large has been fetched, nothing here was touched
            shutil.rmtree(beside.path)
            raise Refusal(list(dict.fromkeys(problems)), f"{SUBJECT} ({place.run})")
        fetched = _fetch_first_whole(store, place, beside, run_dir, there, wanted, say)
        if isinstance(fetched, Path):
            return fetched
        shutil.rmtree(beside.path, ignore_errors=True)
    if mine is None:
        raise Refusal(fetched, f"{place.run}: no checkpoint is whole")
    return mine


def _fetch_first_whole(
    store: Store,
    place: Place,
    beside: RunDir,
    run_dir: RunDir,
    there: Contents,
    wanted: list[str],
    say: Say,
) -> Path | list[Problem]:
    """Bring the first of those that are wanted that is whole, and its best one; else why none is."""
    skipped: list[Problem] = []
    for name in wanted:
        say(f"resume    fetching {name} from {place.run}")
        target = beside.checkpoints / name
        wrong = _fetch_checkpoint(store, place.run_name, target, there.checkpoints[name])
        if not wrong:
            best = _fetch_best(store, place, target, run_dir, there, say)
            return _take_in(beside, run_dir, [*best, name])
        say(f"resume    passed over {name} at {place.run}: {wrong}")
        skipped.append(Problem(name, wrong))
        shutil.rmtree(target, ignore_errors=True)
    return skipped


def _same(store: Store, place: Place, here: Path) -> bool:
    """Whether this machine has the very same checkpoint."""
    if damage(here):
        return False
    theirs = store.read(f"{place.run_name}/checkpoints/{here.name}/{MANIFEST}")
    return theirs == (here / MANIFEST).read_bytes()


def _newest_here(run_dir: RunDir) -> Path | None:
    found = newest_whole(run_dir.checkpoints)
    return found.path if isinstance(found, Found) and run_dir.config.exists() else None


def _fetch_records(store: Store, place: Place, beside: RunDir, there: dict[str, int]) -> None:
    """Bring what going on needs into the folder beside the run, where an earlier try may have begun."""
    beside.checkpoints.mkdir(exist_ok=True)
    beside.logs.mkdir(exist_ok=True)
    for name in (name for name in RECORDS if name in there):
        _fetch(store, f"{place.run_name}/{name}", beside.path / name)


def _fetch_best(
    store: Store, place: Place, chosen: Path, run_dir: RunDir, there: Contents, say: Say
) -> list[str]:
    """Bring the best one that the chosen one names, whose weights the end of the run may take up: its name,
    if it was brought.
    """
    name = best_of(read_manifest(chosen))
    listed = there.checkpoints.get(name, {})
    if name in ("", chosen.name) or (MANIFEST in listed and _same(store, place, run_dir.checkpoints / name)):
        return []
    target, wrong = chosen.with_name(name), f"it has no {MANIFEST}: it was not sent, or not to its end"
    if MANIFEST in listed:
        say(f"resume    fetching {name}, the best one, from {place.run}")
        wrong = _fetch_checkpoint(store, place.run_name, target, listed)
    if wrong:
        say(f"resume    the best one, {name}, is not whole at {place.run}: {wrong}")
        shutil.rmtree(target, ignore_errors=True)
    return [] if wrong else [name]


def _fetch_checkpoint(store: Store, run_name: str, target: Path, listed: dict[str, int]) -> str:
    """Bring one checkpoint beside its place, but for what is here already; what is wrong with it."""
    there = f"{run_name}/checkpoints/{target.name}"
    target.mkdir(exist_ok=True)
    _fetch(store, f"{there}/{MANIFEST}", target / MANIFEST)
    try:
        manifest = read_manifest(target)
        wrong = lacking(listed, manifest)
        if wrong:
            return wrong
        outside = [name for name in manifest["files"] if not _inside(target, name)]
        if outside:
            return f"{outside[0]} would be written outside its folder"
        entries = manifest["files"]
        absent = [name for name, entry in entries.items() if not _have(target / name, entry)]
        _refuse_small_disk(target, sum(entries[name]["bytes"] for name in absent))
        for name in absent:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            _fetch(store, f"{there}/{name}", target / name)
    except (ValueError, KeyError, TypeError) as error:
        return f"its {MANIFEST} cannot be read: {error}"
    return damage(target)


def _refuse_small_disk(target: Path, size: int) -> None:
    free = shutil.disk_usage(target).free
    if size > free:
        why = f"{free / 1e9:,.3f} GB are free, and {target.name} has {size / 1e9:,.3f} GB to be fetched"
        raise refuse(str(target.parent), why, ROOM, subject="the disk of this machine")


def _inside(folder: Path, name: str) -> bool:
    return (folder / name).resolve().is_relative_to(folder.resolve())


def _have(file: Path, entry: dict[str, Any]) -> bool:
    return file.is_file() and file.stat().st_size == entry["bytes"] and checksum(file) == entry["xxh3"]


def _fetch(store: Store, name: str, target: Path) -> None:
    waiting = Waiting(Event())
    for left in reversed(range(TRIES)):
        try:
            store.fetch(name, target)
        except StoreError:
            if left == 0:
                raise
            waiting.longer()
        else:
            return


def _take_in(beside: RunDir, run_dir: RunDir, names: list[str]) -> Path:
    """Move what was fetched to its place, a whole folder or into the one that is here; the last of the
    checkpoints there.
    """
    if not run_dir.path.exists():
        for folder in beside.checkpoints.iterdir():
            if folder.name not in names:  # what an earlier try has left of another one
                shutil.rmtree(folder)
        beside.path.rename(run_dir.path)
        return run_dir.checkpoints / names[-1]
    with held(run_dir) if run_dir.config.exists() else nullcontext():
        run_dir.checkpoints.mkdir(exist_ok=True)
        run_dir.logs.mkdir(exist_ok=True)
        for name in names:
            target = run_dir.checkpoints / name
            if target.exists():
                set_aside(target)
            (beside.checkpoints / name).rename(target)
        for record in (beside.path / record for record in RECORDS):
            if record.exists():
                os.replace(record, run_dir.path / record.name)
    shutil.rmtree(beside.path, ignore_errors=True)
    return run_dir.checkpoints / names[-1]
