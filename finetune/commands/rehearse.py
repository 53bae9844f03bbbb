"""`finetune rehearse`: the whole run with a shrunken twin of its model, on processes of this CPU."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from finetune.distributed.outer import refuse_launcher
from finetune.doctor.check import FAIL, PASS
from finetune.errors import CHECK_SAID_NO, UserError
from finetune.logs import set_up_logging
from finetune.report.terminal import line_width
from finetune.words import Words


def main(words: Words) -> int:
    """Rehearse; 3 when a stage fails."""
    if words.runs:
        raise UserError(f"'{words.runs[0]}' is no key=value. Did you mean recipe={words.runs[0]}?")
    refuse_launcher("rehearse")
    set_up_logging(main=False)
    from finetune.rehearse.every import rehearse_all
    from finetune.rehearse.rehearsal import UNTOLD, Stage, rehearse, stage_lines, verdict

    as_json = "--json" in words.flags
    columns = line_width()

    def told(stage: Stage, label: str) -> None:
        print(stage_lines(stage, label, columns), file=sys.stderr if as_json else sys.stdout, flush=True)

    play = rehearse_all if "--all" in words.flags else rehearse
    stages = play(list(words.overrides), told)
    statuses = {stage.status for stage in stages}
    ok = PASS in statuses and FAIL not in statuses
    if as_json:
        print(json.dumps({"ok": ok, "stages": [asdict(stage) for stage in stages]}))
    else:
        print(f"\n{verdict(stages)}\n{UNTOLD}")
    return 0 if ok else CHECK_SAID_NO
