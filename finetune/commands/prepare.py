"""`finetune prepare`: the data part of a run alone, and what comes of it: counts, lengths, samples."""

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import nullcontext, redirect_stdout

from finetune.config.compose import compose
from finetune.config.rules import resolve_rows
from finetune.errors import Problem, UserError
from finetune.hardware.probe import probe_devices
from finetune.report.data_text import length_lines, longest_lines, sample_lines
from finetune.words import Words


def main(words: Words) -> int:
    """Prepare; returns the exit code."""
    if words.runs:
        raise UserError(f"'{words.runs[0]}' is no key=value. Did you mean data.train={words.runs[0]}?")
    as_json = "--json" in words.flags
    problems: list[Problem] = []
    composed = compose(list(words.overrides), problems=problems)
    config = composed.config
    batch = resolve_rows(config, devices=probe_devices(), problems=problems, subject=composed.subject)
    from finetune.data.prepare import cache_root, prepare_data  # the data libraries: after the checks
    from finetune.training.prepare import count_steps, rows_needed

    needed = rows_needed(config.trainer, batch)
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # a format function may print
        new_tokens = config.adapter.trains_embeddings
        prepared = prepare_data(
            config.data, config.model, config.seed, cache_root(), needed, new_tokens=new_tokens
        )
    steps = count_steps(config.trainer, batch, prepared, composed.subject)
    lines = [*composed.notes, *prepared.lines, batch.line, steps.line]
    for name, said in prepared.statistics.items():
        if said is not None and not as_json:
            lines += ["", *length_lines(name, said), *longest_lines(name, said), ""]
            colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
            lines += sample_lines(name, said, colour=colour, columns=shutil.get_terminal_size().columns)
    print("\n".join([*lines, "", f"page      {prepared.page}"]), file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(
            json.dumps({**prepared.statistics, "steps": {"per_epoch": steps.per_epoch, "total": steps.total}})
        )
    return 0
