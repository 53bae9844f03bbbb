"""`finetune doctor`: is this machine all right, for the recipe or, with --quick, at all?"""

from __future__ import annotations

import json
import os
import shutil
import sys

from finetune.doctor.checklist import checklist, is_ok, record
from finetune.doctor.quick import quick_checks
from finetune.errors import CHECK_SAID_NO, UserError
from finetune.words import Words


def main(words: Words) -> int:
    """Look, and print a numbered checklist; 3 when a check failed."""
    if words.runs:
        raise UserError(f"'{words.runs[0]}' is no key=value: doctor looks at this machine, not at a run.")
    if "--quick" in words.flags:
        checks, report = quick_checks(list(words.overrides))
    else:
        from finetune.doctor.full import full_checks  # composes a config: more than a bare Python can

        checks, report = full_checks(list(words.overrides))
    if "--json" in words.flags:
        print(json.dumps(record(checks, report)))
    else:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        columns = max(shutil.get_terminal_size().columns, 80)
        print(checklist(checks, columns, colour=colour))
    return 0 if is_ok(checks) else CHECK_SAID_NO
