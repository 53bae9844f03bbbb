"""`finetune scale`: is the run faster with more processes, by how much, and if not, why not?"""

from __future__ import annotations

import json
import secrets
import shutil
import sys
from datetime import datetime
from functools import partial
from pathlib import Path

from finetune.distributed.outer import outer_launch
from finetune.errors import RUN_FAILED, UserError, refuse
from finetune.paths import write_whole
from finetune.report.scale_plot import draw_scale
from finetune.report.scale_text import scale_lines
from finetune.words import Words


def main(words: Words) -> int:
    """Measure; 1 when a run failed (what was measured before it is shown and kept)."""
    if words.runs:
        raise UserError(f"'{words.runs[0]}' is no key=value. Did you mean recipe={words.runs[0]}?")
    if (outer := outer_launch()) is not None:
        raise UserError(f"scale starts processes of its own, and {outer.launcher} started this one.")
    from finetune.scale.scaling import scale  # the data libraries: after the words

    as_json = "--json" in words.flags
    say = partial(print, file=sys.stderr if as_json else sys.stdout, flush=True)
    folder = record = None
    failed = ""
    for scaling in scale(list(words.overrides), words.values.get("--hold", "global"), say):
        record, failed = scaling.record, scaling.failed
        if record["points"]:
            folder = folder or _new_folder()
            record["plot"] = str(folder / "scale.png")
            draw_scale(record, folder / "scale.png")
            write_whole(folder / "scale.json", json.dumps(record, indent=2) + "\n")
    assert record is not None
    if as_json:
        print(json.dumps(record))
    else:
        columns = max(shutil.get_terminal_size().columns, 80)
        print(
            "\n".join(["", *scale_lines(record, columns), *([f"plot: {record['plot']}"] if folder else [])])
        )
    if failed:
        print(f"failed: {failed}", file=sys.stderr)
    return RUN_FAILED if failed else 0


def _new_folder() -> Path:
    folder = Path(f"scale-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}").absolute()
    try:
        folder.mkdir()
    except OSError as error:
        why = f"nothing can be written there: {error.strerror}"
        raise refuse(str(folder), why, "Start it in another folder.", subject="scale") from error
    return folder
