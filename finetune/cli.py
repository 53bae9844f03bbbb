"""The command line: verb, runs, key=value and flags; every failure becomes a message and an exit code."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from typing import NoReturn, TextIO, cast

from finetune.errors import RUN_FAILED, FinetuneError, UserError
from finetune.secrets import MaskedStream, Unwritable
from finetune.version import __version__
from finetune.words import DEFAULT, KEPT, NOT_BUILT, VERBS, Words, help_text, split_words

STOPPED = {128 + number: number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
"""Exit codes of a command that a signal has ended."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code. Nothing that it prints shows a secret."""
    if sys.stderr is None:  # closed (`2>&-`)
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for as long as the process
    if sys.stdout is None:
        return _unwritten("it is closed")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what a terminal has no letter for ends nothing
    out, err = (cast("TextIO", MaskedStream(stream)) for stream in (sys.stdout, sys.stderr))
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = _answered(sys.argv[1:] if argv is None else argv)
            out.flush()
            return code
    except BrokenPipeError:
        _print_no_more()  # whoever read the output has gone
        return 141
    except Unwritable as error:
        _print_no_more()
        return _unwritten(error.strerror or str(error))


def _answered(arguments: list[str]) -> int:
    if "--debug" in arguments:
        os.environ["FINETUNE_DEBUG"] = "1"
    verb = DEFAULT
    try:
        words = split_words(arguments)
        verb = words.verb
        code = _run(words)
    except FinetuneError as error:
        if "FINETUNE_DEBUG" in os.environ:
            traceback.print_exc()
        return _told(str(error), error.exit_code, arguments)
    except (KeyboardInterrupt, SystemExit) as ended:
        stopped = ended.code if isinstance(ended, SystemExit) else 128 + signal.SIGINT
        if not isinstance(stopped, int) or stopped not in STOPPED:
            raise
        return _told(_interrupted(verb, stopped), stopped, arguments)
    except (BrokenPipeError, Unwritable):
        raise
    except Exception:  # noqa: BLE001  the interpreter would print it past what masks secrets
        traceback.print_exc()
        return RUN_FAILED
    if code in STOPPED:
        print(_interrupted(verb, code), file=sys.stderr)
    return code


def _run(words: Words) -> int:
    if "--version" in words.flags:
        print(__version__)
        return 0
    if "--help" in words.flags:
        print(help_text(words.verb if words.verb_given else None))
        return 0
    if words.verb in NOT_BUILT:
        raise UserError(f"finetune {words.verb} is not built yet.\n    Built: {', '.join(VERBS)}.")
    with _left_on_signals(words.verb):
        command = import_module(f"finetune.commands.{words.verb}")
        code: int = command.main(words)
        return code


@contextmanager
def _left_on_signals(verb: str) -> Iterator[None]:
    """End by way of every `finally`: what was begun is removed, and no process stays behind.

    What the one who started us ignores (nohup) stays so. The ranks of another launcher wait for each other in
    calls that hear no handler: for them a signal does what it always does.
    """
    if threading.current_thread() is not threading.main_thread() or "RANK" in os.environ:
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _leave)
    if verb == "train":  # a terminal that closes ends no run
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def _told(message: str, code: int, arguments: list[str]) -> int:
    print(message, file=sys.stderr)
    if "--json" in arguments:
        print(json.dumps({"error": message, "exit_code": code}))
    return code


def _interrupted(verb: str, code: int) -> str:
    return f"{verb} was interrupted by {signal.Signals(STOPPED[code]).name}: {KEPT[verb]}"


def _unwritten(why: str) -> int:
    with suppress(OSError):
        print(f"What this command says cannot be written to stdout or stderr: {why}.", file=sys.stderr)
        sys.stderr.flush()
    return RUN_FAILED


def _print_no_more() -> None:
    """What waits to be printed goes nowhere: the interpreter would try once more, and print a traceback."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
