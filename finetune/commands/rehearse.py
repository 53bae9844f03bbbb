"""`finetune rehearse`: the whole run with a shrunken twin of its model, on processes of this CPU."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict

from finetune.distributed.outer import refuse_launcher
from finetune.doctor.check import FAIL, PASS
from finetune.errors import CHECK_SAID_NO, UserError
from finetune.logs import set_up_logging
from finetune.words import Words


def main(words: Words) -> int:
    """Rehearse; 3 when a stage fails."""
    if words.runs:
        raise UserError(f"'{words.runs[0]}' is no key=value. Did you mean recipe={words.runs[0]}?")
    refuse_launcher("rehearse")
    set_up_logging(main=False)
    from finetune.rehearse.every import rehearse_all
    from finetune.rehearse.rehearsal import UNTOLD, Stage, rehearse, stage_lines, verdict

    columns = max(shutil.get_terminal_size().columns, 80)

    def told(stage: Stage) -> None:
        if "--json" not in words.flags:
            print(stage_lines(stage, columns), flush=True)

    play = rehearse_all if "--all" in words.flags else rehearse
    stages = play(list(words.overrides), told)
    statuses = {stage.status for stage in stages}
    ok = PASS in statuses and FAIL not in statuses
    if "--json" in words.flags:
        print(json.dumps({"ok": ok, "stages": [asdict(stage) for stage in stages]}))
    else:
        print(f"\n{verdict(stages)}\n{UNTOLD}")
    return 0 if ok else CHECK_SAID_NO
