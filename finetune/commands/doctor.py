"""`finetune doctor`: is this machine all right, for the recipe or, with --quick, at all?"""

from __future__ import annotations

import json
import os
import shutil
import sys

from finetune.doctor.check import Check
from finetune.doctor.checklist import check_text, is_ok, record, verdict_text
from finetune.doctor.quick import quick_checks
from finetune.errors import CHECK_SAID_NO, UserError
from finetune.words import Words


def main(words: Words) -> int:
    """Look, and print a numbered checklist, each line when it is known; 3 when a check failed."""
    if words.runs:
        raise UserError(f"'{words.runs[0]}' is no key=value: doctor looks at this machine, not at a run.")
    if "--quick" in words.flags:
        report, checks = quick_checks(list(words.overrides))
    else:
        from finetune.doctor.full import full_checks  # composes a config: more than a bare Python can

        report, checks = full_checks(list(words.overrides))
    as_json = "--json" in words.flags
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    columns = max(shutil.get_terminal_size().columns, 80)
    done: list[Check] = []
    for check in checks:
        done.append(check)
        if not as_json:
            print(check_text(len(done), check, columns, colour=colour), flush=True)
    print(json.dumps(record(done, report)) if as_json else verdict_text(done, columns))
    return 0 if is_ok(done) else CHECK_SAID_NO
