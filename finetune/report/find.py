"""Which runs do the words of `finetune report` name?"""

from __future__ import annotations

import os
from pathlib import Path

from finetune.errors import Problem
from finetune.paths import RunDir

TELLING = ("config.yaml", "facts.json", "metrics.jsonl", "checkpoints")
"""One of them is enough: the folder of a run may be broken."""
INSIDE = 2
"""A checkpoint lies so many folders below its run."""


def find_runs(words: tuple[str, ...], problems: list[Problem]) -> list[RunDir]:
    """The run of each word: its folder, or something in it; each run once."""
    found: dict[Path, RunDir] = {}
    for word in words:
        path = Path(os.path.expanduser(word)).absolute()
        if not path.is_dir():
            problems.append(Problem(word, "there is no such folder", "Name a run's folder, as in runs/X."))
            continue
        run = next((at for at in (path, *path.parents[:INSIDE]) if _is_run(at)), None)
        if run is None:
            why = f"it is no run's folder: none of {', '.join(TELLING)} is in it"
            problems.append(Problem(word, why, _hint(path)))
        elif run in found:
            problems.append(Problem(word, "it names a run that is named already", "Leave it out."))
        else:
            found[run] = RunDir(run)
    return list(found.values())


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in TELLING)


def _hint(path: Path) -> str:
    """The runs inside a folder of runs."""
    runs = sorted(inner.name for inner in path.iterdir() if inner.is_dir() and _is_run(inner))
    more = f" and {len(runs) - 5} more" if len(runs) > 5 else ""
    return f"In it are: {', '.join(runs[:5])}{more}." if runs else "Name a run's folder, as in runs/X."
