"""`finetune merge RUN`: one standalone model folder from a run or an adapter, opened afresh and compared."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import Any

from finetune import hub
from finetune.errors import Problem, Refusal, UserError
from finetune.logs import set_up_logging
from finetune.model.fetch import fetch_model
from finetune.model.source import Source, find_source
from finetune.model.target import find_target
from finetune.report.card import card_of
from finetune.report.record import read_report, read_samples
from finetune.training.checkpoint import damage, damaged_file
from finetune.words import Words


def main(words: Words) -> int:
    """Merge; returns the exit code."""
    if len(words.runs) != 1:
        raise UserError("merge takes one RUN: a run's folder, a saved adapter's, or a model's.")
    with redirect_stdout(sys.stderr if "--json" in words.flags else sys.stdout):
        told = merge(words)
    if "--json" in words.flags:
        print(json.dumps(told))
    return 0


def damaged(source: Source) -> str:
    """What has changed in a checkpoint or in a run's model since it was written, in words."""
    if source.trained is not None:
        return damage(source.folder)
    if source.run is None or source.folder != source.run.model or not source.run.report.exists():
        return ""
    return damaged_file(source.folder, read_report(source.run).get("model_files", {}))


def merge(words: Words) -> dict[str, Any]:
    """Check, write, prove, upload; returns what `--json` prints."""
    problems: list[Problem] = []
    source = find_source(words.runs[0], list(words.overrides), problems)
    if source is not None and (wrong := damaged(source)):
        problems.append(Problem(str(source.folder), wrong, "Restore it, or take a checkpoint of the run."))
    dtype, address = words.values.get("--dtype"), words.values.get("--push")
    target = find_target(source, words.values.get("--to"), dtype, problems)
    if address is not None:
        hub.check_push(address, problems)
    if problems or source is None or target is None:
        raise Refusal(problems, f"merge {words.runs[0]}")
    set_up_logging(main=True)
    fetch_model(source.model)
    from finetune.model.standalone import write_standalone  # torch: after the checks

    samples = read_samples(source.run) if source.run is not None else []
    made = write_standalone(source, target, dtype, samples, card_of(source, target.name))
    print(f"done      the model stands alone and is verified: {made.path}", flush=True)
    pushed = {"pushed": hub.push(made.path, address)} if address is not None else {}
    return {**made.as_dict(), "method": source.method, **pushed}
