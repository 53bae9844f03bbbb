"""`finetune plan`: does it fit, on which cards, under which strategy, how fast, and what does it cost?"""

from __future__ import annotations

import json

from finetune.errors import CHECK_SAID_NO, UserError
from finetune.planner.answer import answer
from finetune.planner.record import as_record
from finetune.report.plan_text import plan_lines, side_by_side
from finetune.report.terminal import line_width, takes_colour
from finetune.words import Words


def main(words: Words) -> int:
    """Plan; 3 when the chosen strategy does not fit (on one of the machines, when several are compared)."""
    if words.runs:
        raise UserError(f"'{words.runs[0]}' is no key=value. Did you mean recipe={words.runs[0]}?")
    planned = answer(list(words.overrides))
    if "--json" in words.flags:
        records = [as_record(one.plan, one.config) for one in planned]
        print(json.dumps(records[0] if len(records) == 1 else {"machines": records}))
    else:
        columns = line_width()
        texts = [plan_lines(one.plan, one.config, columns, takes_colour()) for one in planned]
        if len(planned) > 1:
            texts.append(side_by_side([(one.plan, one.config) for one in planned], columns))
        print("\n\n".join([*planned[0].composed.notes, *texts]))
    return 0 if all(one.plan.fits for one in planned) else CHECK_SAID_NO
