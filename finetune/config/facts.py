"""The facts of a run in its folder: worked out once by the parent, read by every worker."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from finetune.config.batch import Batch
from finetune.config.rules import RunFacts
from finetune.config.schema import Strategy
from finetune.paths import write_whole


def save_facts(facts: RunFacts, path: Path) -> None:
    write_whole(path, json.dumps(asdict(facts), indent=2) + "\n")


def load_facts(path: Path) -> RunFacts:
    content = json.loads(path.read_text(encoding="utf-8"))
    return RunFacts(
        **content
        | {
            "requested_strategy": Strategy(content["requested_strategy"]),
            "strategy": Strategy(content["strategy"]),
            "batch": Batch(**content["batch"]),
            "notes": tuple(content["notes"]),
        }
    )
