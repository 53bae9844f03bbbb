"""A user's own format: a Python function, named `module:function`, that makes rows of a known one."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from finetune.data.chunk import Chunk
from finetune.data.source import SUBJECT
from finetune.errors import Problem, Refusal, refuse

OwnFormat = Callable[[dict[str, Any]], dict[str, Any] | None]


def load_function(name: str) -> OwnFormat:
    """Import the function `module:function`; modules of the working directory are found."""
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as error:
        missing = "" if error.name == module_name else f", which {module_name} imports"
        why = f"there is no module {error.name}{missing}"
        raise _refused(name, why, f"Looked in {os.getcwd()} too.") from error
    except AttributeError as error:
        raise _refused(name, f"{module_name} has no function {function_name}") from error
    except Exception as error:
        raise _refused(name, f"{module_name} fails to import: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise _refused(name, f"{function_name} is no function")
    return function


def function_source(name: str) -> str:
    """A digest of the function's module and of what it imports from beside it: a change makes rows anew."""
    load_function(name)
    module = sys.modules[name.partition(":")[0]]
    beside = Path(module.__file__ or ".").resolve().parent
    files = {Path(str(other.__file__)) for other in [*sys.modules.values()] if hasattr(other, "__file__")}
    own = sorted(
        file
        for file in files
        if file.is_file() and file.suffix == ".py" and file.resolve().is_relative_to(beside)
    )
    digest = hashlib.sha256()
    for file in own:
        digest.update(str(file).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def call_on_rows(
    function: OwnFormat, name: str, chunk: Chunk, numbers: list[int], rows: list[dict[str, Any]]
) -> tuple[list[tuple[int, dict[str, Any]]], list[int], list[Problem]]:
    """Call the function on each row: (number, row) of those made, numbers of those left out, what failed."""
    made, left_out, problems = [], [], []
    for number, row in zip(numbers, rows, strict=True):
        try:
            result = function(deepcopy(row))  # it may change the row, and is called again for the first ones
        except (Exception, SystemExit) as error:  # noqa: BLE001  the user's function may fail in any way
            problems.append(chunk.problem(number, f"{name} raised {type(error).__name__}: {error}"))
            continue
        if result is None:
            left_out.append(number)
        elif isinstance(result, dict):
            made.append((number, result))
        else:
            why = f"{name} returned {type(result).__name__}, not a row (a dict) or None"
            problems.append(chunk.problem(number, why))
    return made, left_out, problems


def _refused(name: str, why: str, fix: str = "") -> Refusal:
    known = "A format is one of ours or a function of yours, written module:function."
    return refuse(f"format={name}", why, f"{fix} {known}".strip(), subject=SUBJECT)
