"""`finetune prepare`: the data part of a run alone, and what comes of it: counts, lengths, samples."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import nullcontext, redirect_stdout

from finetune.errors import UserError
from finetune.report.data_text import length_lines, longest_lines, sample_lines
from finetune.report.terminal import takes_colour
from finetune.training.data_alone import prepare_alone
from finetune.words import Words


def main(words: Words) -> int:
    """Prepare; returns the exit code."""
    if words.runs:
        raise UserError(f"'{words.runs[0]}' is no key=value. Did you mean data.train={words.runs[0]}?")
    as_json = "--json" in words.flags
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # a format function may print
        data = prepare_alone(list(words.overrides))
    lines = list(data.lines)
    for name, said in data.statistics.items():
        if said is not None and not as_json:
            lines += ["", *length_lines(name, said), *longest_lines(name, said), ""]
            columns = shutil.get_terminal_size().columns
            lines += sample_lines(name, said, colour=takes_colour(), columns=columns)
    print("\n".join([*lines, "", f"page      {data.page}"]), file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(data.record))
    return 0
