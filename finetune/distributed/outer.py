"""What a launcher that is not ours (accelerate launch, torchrun) has set up, read from its environment.

What it leaves behind differs: `accelerate launch --num_processes 1` sets no RANK, only ACCELERATE_*; plain
torchrun sets no ACCELERATE_*; an FSDP file with use_cpu sets ACCELERATE_USE_FSDP but not ACCELERATE_USE_CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
import yaml

from finetune.config.schema import Strategy
from finetune.errors import Problem, UserError

LAUNCHER_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
"""Variables of accelerate's launcher that would steer the Trainer; read once here, removed before the Trainer
exists.
"""


@dataclass(frozen=True, slots=True)
class OuterLaunch:
    """What the outer launcher says. null: it does not say."""

    launcher: str
    num_processes: int
    strategy: Strategy | None
    on_cpu: bool
    num_machines: int = 1
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    """What it demands that is not offered here."""


def refuse_launcher(verb: str) -> None:
    """For verbs that start processes of their own.

    Raises:
        UserError: another launcher has started this one, among others.
    """
    outer = outer_launch()
    if outer is not None:
        raise UserError(f"{verb} starts processes of its own, and {outer.launcher} started this one.")


def outer_launch(environment: Mapping[str, str] = os.environ) -> OuterLaunch | None:
    """The launcher around this process; null: none, this is a plain `python -m finetune`."""
    by_accelerate = "ACCELERATE_DYNAMO_MODE" in environment or "ACCELERATE_CONFIG_DS_FIELDS" in environment
    if not by_accelerate and "RANK" not in environment:
        return None
    strategy, notes = _strategy(environment)
    size = int(environment.get("WORLD_SIZE", "1"))
    return OuterLaunch(
        launcher="accelerate launch" if by_accelerate else "torchrun",
        num_processes=size,
        num_machines=max(size // int(environment.get("LOCAL_WORLD_SIZE", size)), 1),
        strategy=strategy,
        on_cpu=_true(environment, "ACCELERATE_USE_CPU"),
        notes=notes,
        problems=tuple(_not_offered(environment)),
    )


def strategy_problems(outer: OuterLaunch, strategy: Strategy) -> list[Problem]:
    """Where the outer launcher was configured for another strategy than the config's."""
    if outer.strategy is None or strategy is outer.strategy:
        return []
    return [
        Problem(
            f"distributed={strategy.value}",
            f"{outer.launcher} was configured for {outer.strategy.value}.",
            f"Use distributed={outer.strategy.value}, or an accelerate config for {strategy.value} (a run's "
            "own accelerate.yaml is one), or `python -m finetune`, which starts the processes itself.",
        )
    ]


def precision_problems(precision: str, environment: Mapping[str, str] = os.environ) -> list[Problem]:
    """A precision in the environment that is not the run's; accelerate's default `no` says nothing."""
    named = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if named in ("no", precision):
        return []
    return [
        Problem(
            f"ACCELERATE_MIXED_PRECISION={named}",
            f"the launcher or the shell sets it, and this run computes in {precision}.",
            f"Set the precision in one place: trainer.{named}=true here, or leave mixed_precision out of the "
            "launcher's file and the environment.",
        )
    ]


def fsdp1_problem(launch_command: list[str], environment: Mapping[str, str] = os.environ) -> Problem | None:
    """An accelerate file that demands FSDP version 1 in so many words.

    accelerate exports `FSDP_VERSION=1` also for a file without `fsdp_version`, so the file itself, named on
    the launcher's command line, has to be read.
    """
    if not _true(environment, "ACCELERATE_USE_FSDP"):
        return None
    flags = dict(pairwise(launch_command))
    demanded = flags.get("--fsdp_version")
    file = Path(flags.get("--config_file", _default_config_file(environment)))
    if demanded is None and file.is_file():
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        demanded = (content.get("fsdp_config") or {}).get("fsdp_version")
    if str(demanded) != "1":
        return None
    return Problem(
        f"fsdp_version=1 ({file})",
        "FSDP version 1 is not offered here: it is deprecated in accelerate and transformers.",
        f"Convert the file with: accelerate to-fsdp2 --config_file {file} --output_file fsdp2.yaml",
    )


def parent_command() -> list[str]:
    """The command line of the launcher that started this process."""
    return list(psutil.Process(os.getppid()).cmdline())


def _default_config_file(environment: Mapping[str, str]) -> str:
    cache = environment.get("XDG_CACHE_HOME", "~/.cache")
    home = environment.get("HF_HOME", f"{cache}/huggingface")
    return str(Path(home, "accelerate", "default_config.yaml").expanduser())


def _not_offered(environment: Mapping[str, str]) -> Iterator[Problem]:
    """DeepSpeed settings that this run would otherwise drop without a word."""
    if not _true(environment, "ACCELERATE_USE_DEEPSPEED"):
        return
    file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file.lower() != "none":
        yield Problem(
            f"deepspeed_config_file={file}",
            "a DeepSpeed file of one's own is not read: its numbers would stand beside those of trainer.",
            "Use distributed=zero1, zero2, zero3 or their offload variants, and trainer.* for the numbers.",
        )
    stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    if stage not in ("1", "2", "3") or (stage == "1" and _offloads(environment)):
        what = "zero_stage=1 with offload" if stage == "1" else f"zero_stage={stage}"
        yield Problem(
            what, "there is no such strategy here.", "Use stage 2 or 3 with offload, 1 without, or ddp."
        )


def _offloads(environment: Mapping[str, str]) -> bool:
    devices = (
        environment.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{part}_DEVICE") for part in ("OPTIMIZER", "PARAM")
    )
    return any(device not in (None, "none") for device in devices)


def _strategy(environment: Mapping[str, str]) -> tuple[Strategy | None, tuple[str, ...]]:
    if _true(environment, "ACCELERATE_USE_DEEPSPEED"):
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        name = f"zero{stage}_offload" if _offloads(environment) else f"zero{stage}"
        return (Strategy(name) if name in Strategy.__members__ else None), ()
    if _true(environment, "ACCELERATE_USE_FSDP"):
        offload = _true(environment, "FSDP_OFFLOAD_PARAMS")
        notes: tuple[str, ...] = ()
        if environment.get("FSDP_VERSION", "1") == "1":
            notes = ("the accelerate file names no fsdp_version: FSDP2 is used",)
        return (Strategy.fsdp_offload if offload else Strategy.fsdp), notes
    return None, ()


def _true(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "false").lower() in ("true", "1")
