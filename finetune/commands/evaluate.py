"""`finetune evaluate [RUN]`: how well do a model and its base predict held-out rows, and answer them?"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from functools import partial

from finetune.distributed.outer import refuse_launcher
from finetune.errors import UserError
from finetune.inference.evaluation import SAMPLES, evaluate
from finetune.inference.flags import listed, number
from finetune.logs import set_up_logging
from finetune.progress import tell
from finetune.report.evaluation_text import evaluation_lines
from finetune.report.terminal import line_width
from finetune.words import Words


def main(words: Words) -> int:
    """Evaluate; returns the exit code."""
    if len(words.runs) > 1:
        raise UserError(f"evaluate takes one RUN; '{words.runs[1]}' is a second one.")
    refuse_launcher("evaluate")
    as_json = "--json" in words.flags
    say = partial(print, file=sys.stderr, flush=True) if as_json else tell
    values = words.values
    with redirect_stdout(sys.stderr if as_json else sys.stdout):  # a metric of the user's may print
        set_up_logging(main=True)
        evaluation = evaluate(
            words.runs[0] if words.runs else None,
            *words.overrides,
            samples=number(values, "--samples", SAMPLES),
            metrics=listed(values, "--metric"),
            tasks=listed(values, "--tasks"),
            bits=number(values, "--bits", None),
            max_new_tokens=number(values, "--max-new-tokens", None),
            say=say,
        )
    if as_json:
        print(json.dumps(evaluation.record))
    else:
        print("\n".join(evaluation_lines(evaluation.record, line_width())))
    return 0
