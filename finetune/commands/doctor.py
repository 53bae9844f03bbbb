"""`finetune doctor`: is this machine all right, for the recipe or, with --quick, at all?"""

from __future__ import annotations

import json
import sys
from threading import Timer

from finetune.doctor.check import Check
from finetune.doctor.checklist import check_text, is_ok, record, verdict_text
from finetune.doctor.quick import quick_checks
from finetune.errors import CHECK_SAID_NO, UserError
from finetune.report.terminal import line_width, takes_colour
from finetune.words import Words

SILENT_SECONDS = 10.0
"""Then it is said that something is being waited for."""


def main(words: Words) -> int:
    """Look, and print a numbered checklist, each line when it is known; 3 when a check failed."""
    if words.runs:
        raise UserError(f"'{words.runs[0]}' is no key=value: doctor looks at this machine, not at a run.")
    waiting = Timer(SILENT_SECONDS, _tell_waiting)
    waiting.daemon = True
    waiting.start()
    try:
        if "--quick" in words.flags:
            report, checks = quick_checks(list(words.overrides))
        else:
            from finetune.doctor.full import full_checks  # composes a config: more than a bare Python can

            report, checks = full_checks(list(words.overrides))
    finally:
        waiting.cancel()
    as_json = "--json" in words.flags
    colour = takes_colour()
    columns = line_width()
    done: list[Check] = []
    for check in checks:
        done.append(check)
        if not as_json:
            print(check_text(len(done), check, columns, colour=colour), flush=True)
    print(json.dumps(record(done, report)) if as_json else verdict_text(done, columns))
    return 0 if is_ok(done) else CHECK_SAID_NO


def _tell_waiting() -> None:
    print(
        "still looking at the machine; nvidia-smi may take a minute to wake cards, or to be given up",
        file=sys.stderr,
        flush=True,
    )
