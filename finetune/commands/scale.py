"""`finetune scale`: is the run faster with more processes, by how much, and if not, why not?"""

from __future__ import annotations

import json
import secrets
import sys
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from finetune.distributed.outer import refuse_launcher
from finetune.errors import RUN_FAILED, UserError, refuse
from finetune.paths import write_whole
from finetune.report.scale_plot import draw_scale
from finetune.report.scale_text import scale_lines
from finetune.report.terminal import line_width
from finetune.words import Words


def main(words: Words) -> int:
    """Measure; 1 when a run failed (what was measured before it is shown and kept)."""
    if words.runs:
        raise UserError(f"'{words.runs[0]}' is no key=value. Did you mean recipe={words.runs[0]}?")
    refuse_launcher("scale")
    from finetune.scale.scaling import scale  # the data libraries: after the words

    as_json = "--json" in words.flags
    say = partial(print, file=sys.stderr if as_json else sys.stdout, flush=True)
    folder = _new_folder()
    record: dict[str, Any] | None = None
    try:
        for scaling in scale(list(words.overrides), words.values.get("--hold", "global"), say):
            record = scaling.record
            if record["points"]:
                record["plot"] = str(folder / "scale.png")
                draw_scale(record, folder / "scale.png")
                write_whole(folder / "scale.json", json.dumps(record, indent=2) + "\n")
    except (KeyboardInterrupt, SystemExit):
        print(_kept(record, folder), file=sys.stderr)
        raise
    finally:
        with suppress(OSError):  # something was measured: it is not empty
            folder.rmdir()
    assert record is not None
    if as_json:
        print(json.dumps(record))
    else:
        plot = [f"plot: {record['plot']}"] if record["points"] else []
        print("\n".join(["", *scale_lines(record, line_width()), *plot]))
    if record["failed"]:
        print(f"failed: {record['failed']}", file=sys.stderr)
    return RUN_FAILED if record["failed"] else 0


def _kept(record: dict[str, Any] | None, folder: Path) -> str:
    """What is left where it is stopped before its end."""
    points = record["points"] if record is not None else []
    if not points:
        return "kept: nothing, no run had ended"
    return f"kept: {len(points)} point{'s' * (len(points) > 1)} in {folder}"


def _new_folder() -> Path:
    folder = Path(f"scale-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}").absolute()
    try:
        folder.mkdir()
    except OSError as error:
        why = f"nothing can be written there: {error.strerror}"
        raise refuse(str(folder), why, "Start it in another folder.", subject="scale") from error
    return folder
