"""`finetune report RUN [RUN ...]`: a run as a page, or several side by side."""

from __future__ import annotations

import json
import secrets
import sys
from datetime import datetime
from pathlib import Path

from finetune.errors import Problem, Refusal, UserError, refuse
from finetune.report.comparison import compare, write_comparison
from finetune.report.find import find_runs
from finetune.report.page import write_page
from finetune.report.reading import read_run
from finetune.report.results import record_of
from finetune.words import Words


def main(words: Words) -> int:
    """Write the page; returns the exit code. What is missing of a run is told, and keeps nobody from one."""
    named = [word for word in words.overrides if Path(word).is_dir()]  # a folder may be called lr=0.1
    keys = [word for word in words.overrides if word not in named]
    if keys:
        raise UserError(f"report takes no keys: '{keys[0]}'. It shows runs as they are.")
    runs = (*words.runs, *named)
    if not runs:
        raise UserError("report takes a RUN or several: folders of runs, as in runs/X.")
    problems: list[Problem] = []
    found = find_runs(runs, problems)
    if problems:
        raise Refusal(problems, f"report {' '.join(runs)}")
    readings = [read_run(run_dir) for run_dir in found]
    folder = found[0].path if len(found) == 1 else None
    try:
        if folder is not None:
            record = record_of(readings[0])
            page = write_page(readings[0])
        else:
            record = compare(readings)
            folder = _new_folder()
            page = write_comparison(readings, record, folder)
    except OSError as error:
        why = f"nothing can be written there: {error.strerror}"
        where = str(error.filename or folder or Path.cwd())
        raise refuse(where, why, "Free it, or make the report elsewhere.", subject="the report") from error
    to = sys.stderr if "--json" in words.flags else sys.stdout
    for reading in readings:
        for note in reading.missing:
            print(f"missing   {reading.run_dir.path.name}: {note}", file=to)
    print(f"page      {page}", file=to)
    if "--json" in words.flags:
        print(json.dumps({**record, "page": str(page)}, allow_nan=False))
    return 0


def _new_folder() -> Path:
    folder = Path(f"comparison-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}").absolute()
    folder.mkdir()
    return folder
