"""Why did a run die? Known causes, recognised by what its processes said and how they were ended.

Nothing is guessed: where no known cause matches there is no diagnosis.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from finetune.config.facts import load_facts
from finetune.config.rules import RunFacts
from finetune.config.saved import load_config
from finetune.config.schema import RunConfig
from finetune.distributed.launch import Ended
from finetune.errors import FinetuneError, is_ours
from finetune.paths import RunDir
from finetune.secrets import masked
from finetune.training.causes import CAUSES, UNWRITTEN, Cause
from finetune.training.figures import Clue, Kills, count_kills, is_full

WIDTH, INDENT = 80, 10
END_BYTES = 2**16
"""So much of the end of a log is looked at."""
ASKS_FURTHER = "torch cannot use it"
"""Part of a message of ours that cannot say why: the log may hold the library's reason."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A known cause, as it stands in report.json."""

    cause: str
    rank: int | None
    """Whose failure it is; null: the command's own process, or the launcher."""
    told: str
    advice: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """What the terminal shows above the failure itself."""
        first, *rest = self.told.splitlines()
        return [
            *_wrapped("diagnosis ", first),
            *(line for part in rest for line in _wrapped("", part)),
            *(line for way in self.advice for line in _wrapped("to do", way)),
        ]

    @property
    def record(self) -> dict[str, Any]:
        return {**asdict(self), "advice": list(self.advice)}


@dataclass(frozen=True, slots=True)
class Before:
    """A run as it stands before its processes start."""

    run_dir: RunDir
    config: RunConfig
    facts: RunFacts
    sizes: Mapping[str, int]
    """Bytes of each log: a resumed run goes on with what is there."""
    kills: Kills


def look_before(run_dir: RunDir) -> Before:
    sizes = {file.name: file.stat().st_size for file in run_dir.logs.glob("*.log")}
    return Before(run_dir, load_config(run_dir.config), load_facts(run_dir.facts), sizes, count_kills())


def diagnose(before: Before, ended: Ended | None = None) -> Diagnosis | None:
    """The known cause of a failure, by the words of all ranks; `ended`: how our launcher saw it end."""
    with suppress(Exception):  # half of a file, a full disk, words in another order: it must hide no failure
        logs = _logs(before)
        return _first(_words(before, logs, ended), before, logs)
    return None


def diagnose_error(before: Before, error: BaseException) -> Diagnosis | None:
    """The same for a failure of the command's own process, which prepares the data."""
    text = f"{type(error).__name__}: {error}"
    with suppress(Exception):
        return _first([_Words(None, text, 0.0, ours=isinstance(error, FinetuneError))], before, {})
    return None


@dataclass(frozen=True, slots=True)
class _Words:
    """What one process left."""

    rank: int | None
    text: str
    time: float
    """Of its failure; infinite: not known."""
    sign: str = ""
    ours: bool = False
    """A message that we wrote, which tells its cause itself."""
    sure: bool = True
    """It has failed: words of no known cause are then an unknown cause, and no consequence is told for it."""


def _words(before: Before, logs: Mapping[int, str], ended: Ended | None) -> list[_Words]:
    """What each rank said of its failure; of one that could say nothing, its log and how it ended."""
    run_dir, words = before.run_dir, []
    if ended is not None and ended.failed_rank is None and ended.signal:
        return [_Words(None, "", 0.0, ended.signal)]  # the launcher: all ranks only noticed it
    spoke = {
        int(file.name.split("-")[1].split(".")[0]): file for file in run_dir.logs.glob("rank-*.failed.json")
    }
    for rank, file in spoke.items():
        content = file.read_text(encoding="utf-8")
        if not content and is_full(run_dir.path):
            words.append(_Words(rank, logs.get(rank, ""), math.inf, UNWRITTEN))
            continue
        said = json.loads(content)
        text = said["told"]
        more = f"\n{logs.get(rank, '')}" if ASKS_FURTHER in text else ""
        words.append(_Words(rank, text + more, said["time"], ours=is_ours(text)))
    for rank in sorted(set(logs) - set(spoke)):
        sure = ended is not None and rank == ended.failed_rank
        sign = ended.signal if ended is not None and sure else ""
        text = logs[rank] if sure else _behind_steps(logs[rank])
        words.append(_Words(rank, text, math.inf, sign, sure=sure))
    if ended is not None and ended.failed_rank is None:
        words.append(_Words(None, _end_of("launcher.log", before), math.inf))
    return words


def _first(words: list[_Words], before: Before, logs: Mapping[int, str]) -> Diagnosis | None:
    """The cause before its consequences, and of several the first; none where the first is not known."""
    found: list[tuple[int, float, int, _Words, Cause | None]] = []
    for said in words:
        cause = _cause_of(said)
        if cause is not None:
            found.append((cause.level, said.time, CAUSES.index(cause), said, cause))
        elif said.sure:
            found.append((0, said.time, len(CAUSES), said, None))
    if not found:
        return None
    *_, said, cause = min(found, key=lambda row: row[:3])
    if cause is None:
        return None
    silent = tuple(other.rank for other in words if other.rank is not None and other.time == math.inf)
    clue = Clue(before.run_dir, before.config, before.facts, said.rank, said.text, logs, silent, before.kills)
    alone = "the launcher" if said.sign else "this process"
    who = alone if said.rank is None else f"rank {said.rank}"
    told = [cause.told.format(who=who), *cause.figures(clue)]
    return Diagnosis(cause.name, said.rank, masked("\n".join(told)), tuple(map(masked, cause.advice(clue))))


def _cause_of(said: _Words) -> Cause | None:
    for cause in CAUSES:
        if said.sign and cause.sign == said.sign:
            return cause
    return next((c for c in CAUSES if c.matches(said.text) and (c.adds_to_ours or not said.ours)), None)


def _logs(before: Before) -> dict[int, str]:
    """The end of every rank's log."""
    files = (re.fullmatch(r"rank-(\d+)\.log", file.name) for file in before.run_dir.logs.glob("rank-*.log"))
    return {int(name[1]): _end_of(name[0], before) for name in files if name is not None}


def _behind_steps(log: str) -> str:
    """What came after the last step that went well: what was told before it has ended nothing."""
    return re.split(r"^step\s+\d+/", log, flags=re.MULTILINE)[-1]


def _end_of(name: str, before: Before) -> str:
    """The end of what this start of the run has logged."""
    file = before.run_dir.logs / name
    if not file.exists():
        return ""
    with file.open("rb") as stream:
        stream.seek(max(before.sizes.get(name, 0), file.stat().st_size - END_BYTES))
        return stream.read().decode("utf-8", errors="replace")


def _wrapped(label: str, text: str) -> list[str]:
    lines = textwrap.wrap(text, WIDTH - INDENT, break_long_words=False, break_on_hyphens=False)
    return [f"{label if number == 0 else '':<{INDENT}}{line}" for number, line in enumerate(lines)]
