"""What the rules look at: the config, the machine, and what was already worked out from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from finetune.config.devices import Devices
from finetune.config.schema import Method, RunConfig, Strategy
from finetune.config.strategy import TRAITS, Engine
from finetune.errors import Problem

COMMAND_LINE = "command line"
FSDP = tuple(s for s, t in TRAITS.items() if t.engine is Engine.fsdp2)
DEEPSPEED = tuple(s for s, t in TRAITS.items() if t.engine is Engine.deepspeed)


class Lack(Problem):
    """A problem of this machine and not of the words: with what it lacks they could be done."""

    __slots__ = ()


@dataclass(slots=True)
class Case:
    """One config on one machine, and what is found about it."""

    config: RunConfig
    devices: Devices
    given: Mapping[str, str]
    """Keys that somebody set -> where: `COMMAND_LINE`, or a recipe."""
    world: int | None
    """Processes that another launcher has started; null: none has."""
    device: str = "cpu"
    strategy: Strategy = Strategy.single
    processes: int = 1
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def refuse(self, where: str, why: str, fix: str = "") -> None:
        """Add a problem; all of them are told together."""
        self.problems.append(Problem(where, why, fix))

    def lack(self, where: str, why: str, fix: str = "") -> None:
        """Add what this machine lacks."""
        self.problems.append(Lack(where, why, fix))

    def on_command_line(self, key: str) -> bool:
        return self.given.get(key) == COMMAND_LINE

    @property
    def trains_adapter(self) -> bool:
        return self.config.adapter.method is not Method.full
