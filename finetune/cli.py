"""The command line: verb, runs, key=value and flags; every failure becomes a message and an exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from typing import TextIO, cast

from finetune.errors import RUN_FAILED, FinetuneError, UserError
from finetune.secrets import MaskedStream
from finetune.version import __version__
from finetune.words import NOT_BUILT, VERBS, Words, help_text, split_words


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code. Nothing that it prints shows a secret."""
    out, err = (cast("TextIO", MaskedStream(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        return _answered(argv)


def _answered(argv: list[str] | None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if "--debug" in arguments:
        os.environ["FINETUNE_DEBUG"] = "1"
    try:
        words = split_words(arguments)
        return _run(words)
    except FinetuneError as error:
        if "FINETUNE_DEBUG" in os.environ:
            traceback.print_exc()
        print(error, file=sys.stderr)
        if "--json" in arguments:
            print(json.dumps({"error": str(error), "exit_code": error.exit_code}))
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read the output has gone
        return 141
    except Exception:  # noqa: BLE001  the interpreter would print it past what masks secrets
        traceback.print_exc()
        return RUN_FAILED


def _run(words: Words) -> int:
    if "--version" in words.flags:
        print(__version__)
        return 0
    if "--help" in words.flags:
        print(help_text(words.verb if words.verb_given else None))
        return 0
    if words.verb in NOT_BUILT:
        raise UserError(f"finetune {words.verb} is not built yet.\n    Built: {', '.join(VERBS)}.")
    if words.verb != "train":  # its parent saves first
        _leave_on_signals()
    command = import_module(f"finetune.commands.{words.verb}")
    code: int = command.main(words)
    return code


def _leave_on_signals() -> None:
    """End by way of every `finally`: what was begun is removed, and no process stays behind."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
