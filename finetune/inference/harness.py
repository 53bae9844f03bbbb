"""Runs tasks of lm-evaluation-harness (the extra `eval`) on a model that is open already."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from finetune.config.packages import installed
from finetune.errors import Problem, RunFailed

PACKAGE = "lm_eval"
SUFFIXES = (".yaml", ".yml")


def check_tasks(tasks: Sequence[str], problems: list[Problem]) -> None:
    """Whether the package is here, and each task: one of its names, or a file of one's own."""
    if not tasks:
        return
    if installed("lm-eval") is None:
        why = "needs lm-eval, which is not installed"
        problems.append(
            Problem(f"--tasks {','.join(tasks)}", why, "Install it: pip install 'finetune[eval]'")
        )
        return
    files = [task for task in tasks if task.endswith(SUFFIXES)]
    for task in files:
        if not Path(task).is_file():
            problems.append(Problem(f"--tasks {task}", f"there is no file {Path(task).absolute()}"))
    named = [task for task in tasks if task not in files]
    known = set(_manager().all_tasks) if named else set()
    for task in named:
        if task not in known:
            fix = "All names: lm-eval ls tasks. A file of your own ends in .yaml."
            problems.append(Problem(f"--tasks {task}", "lm-eval has no task of that name", fix))


def run_tasks(model: Any, tokenizer: Any, tasks: Sequence[str], batch_size: int) -> dict[str, Any]:
    """`{task: {metric: {"value", "stderr"}}}`, with the package's own prompts and no chat template."""
    evaluator = import_module(f"{PACKAGE}.evaluator")
    models = import_module(f"{PACKAGE}.models.huggingface")
    logging.getLogger(PACKAGE).setLevel(logging.WARNING)
    asked = models.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, backend="causal")
    try:
        said = evaluator.simple_evaluate(
            model=asked, tasks=list(tasks), task_manager=_manager(), log_samples=False, bootstrap_iters=1000
        )
    except (OSError, ValueError, KeyError, ConnectionError) as error:
        raise RunFailed(
            f"lm-eval could not run {', '.join(tasks)}: {type(error).__name__}: {error}"
        ) from error
    return {task: _figures(figures) for task, figures in said["results"].items()}


def _manager() -> Any:
    return import_module(f"{PACKAGE}.tasks").TaskManager()


def _figures(figures: dict[str, Any]) -> dict[str, Any]:
    """`acc,none` and `acc_stderr,none` as one figure; a filter that has a name stays in it."""
    found: dict[str, Any] = {}
    for key, value in figures.items():
        metric, _, chosen = key.partition(",")
        if not chosen or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = figures.get(f"{metric}_stderr,{chosen}")
        name = metric if chosen == "none" else f"{metric} ({chosen})"
        found[name] = {"value": value, "stderr": error if isinstance(error, int | float) else None}
    return found
