"""Which runs `finetune scale` makes of the words of a command line: numbers of processes times strategies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from finetune.config.case import COMMAND_LINE
from finetune.config.compose import compose
from finetune.config.rules_trainer import NEEDS_EVALUATION
from finetune.config.schema import Device, RunConfig, Strategy
from finetune.config.trainer_fields import AUTO
from finetune.errors import DoesNotFit, Problem, Refusal
from finetune.hardware.probe import probe_devices
from finetune.training.planned import lacking
from finetune.training.start import CheckedRun, check_run
from finetune.training.timing import steps_in_all

GLOBAL, MICRO = HOLDS = ("global", "micro")
"""The rows of an optimizer step stay as processes are added, or those of one process do."""
TIMED, FEWEST = 12, 3
"""Timed steps where nobody says how many, and how many a median takes at least."""
COUNTS, STRATEGIES = "launch.num_processes=", "distributed="
NOTHING_ELSE = (
    *("trainer.eval_strategy=no", "trainer.eval_on_start=false", "tracking.report_to=none"),
    *("checkpoint.best=null", "checkpoint.early_stopping_patience=null", "checkpoint.resume=never"),
    *("checkpoint.remote=null", "checkpoint.stop_at=null", "launch.detach=false", "data.eval_samples=0"),
)
"""What a short run of this kind leaves out: the steps alone are of interest."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One run to be made."""

    num_processes: int
    requested: str
    """The strategy that was asked for."""
    run: CheckedRun

    @property
    def unfit(self) -> str:
        """Why the run is left out: what it lacks by its plan; empty where it fits."""
        plan, config = self.run.plan, self.run.config
        return "" if isinstance(plan, str) or plan.fits or not config.plan.enforce else lacking(plan)


@dataclass(frozen=True, slots=True)
class Grid:
    """The runs, the smallest first for each strategy."""

    wanted: list[Wanted]
    notes: list[str]


def grid_of(overrides: list[str], hold: str, folder: Path) -> Grid:
    """The runs that the words mean, each with its config checked; `folder` is where they would be.

    Raises:
        Refusal: something has to be changed, in whichever of them.
        DoesNotFit: all fit but one or none of several, so that nothing could be compared.
    """
    problems: list[Problem] = []
    if hold not in HOLDS:
        problems.append(Problem(f"--hold {hold}", f"expected one of {', '.join(HOLDS)}"))
    named = [word for word in overrides if word.startswith(COUNTS)]
    listed = [word for word in overrides if word.startswith(f"{STRATEGIES}[")]
    rest = [word for word in overrides if word not in (*named, *listed)]
    given = _counts(named[-1], problems) if named else None
    composed = compose(rest, problems=problems)
    config = composed.config
    if config.launch.num_machines > 1:
        where, why = f"launch.num_machines={config.launch.num_machines}", "one machine is measured at a time"
        problems.append(Problem(where, why, "Leave the key out."))
    strategies = _names(listed[-1], STRATEGIES) if listed else [config.distributed.strategy.value]
    counts = given or doubled(_largest(config))
    own = composed.provenance.get("trainer.max_steps") == COMMAND_LINE
    timed = config.trainer.max_steps if own else TIMED
    if timed < FEWEST:
        problems.append(Problem(f"trainer.max_steps={timed}", f"a median takes at least {FEWEST} steps"))
    words = [*rest, *NOTHING_ELSE, *_batch_words(config, counts, hold, problems)]
    words += [f"trainer.max_steps={steps_in_all(timed)}", f"output_dir={folder}"]
    if config.trainer.lr_scheduler_type in NEEDS_EVALUATION:
        words.append("trainer.lr_scheduler_type=constant")
    pairs = [(s, n) for s in strategies for n in counts if n == 1 or s != Strategy.single]
    if not pairs and not problems:
        where, why = f"{STRATEGIES}single", f"it is one process, and {named[-1]} names others"
        problems.append(Problem(where, why, "Add 1, or choose another strategy."))
    wanted = [] if problems else [_checked(words, bool(listed), *pair, problems) for pair in pairs]
    if problems:
        raise Refusal(list(dict.fromkeys(problems)), composed.subject)
    runs = [one for one in wanted if one is not None]
    _refuse_unfit(runs, composed.subject)
    return Grid(runs, composed.notes)


def doubled(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest."""
    powers = [2**power for power in range(largest.bit_length()) if 2**power <= largest]
    return sorted({*powers, largest})


def _counts(word: str, problems: list[Problem]) -> list[int]:
    """`[1,2,4]`, or one number: doubled up to it."""
    names = _names(word, COUNTS)
    if all(name.isdecimal() and int(name) > 0 for name in names):
        counts = [int(name) for name in names]
        return sorted(set(counts)) if "[" in word else doubled(counts[0])
    why = "expected numbers of processes, 1 or more"
    problems.append(Problem(word, why, f"E.g. {COUNTS}[1,2,4], or {COUNTS}4 for 1, 2 and 4."))
    return [1]


def _names(word: str, key: str) -> list[str]:
    text = word.removeprefix(key).strip()
    return [name.strip() for name in text.removeprefix("[").removesuffix("]").split(",")]


def _largest(config: RunConfig) -> int:
    """Processes that this machine has a device, or a core, for."""
    devices = probe_devices()
    return devices.cpu_cores if config.launch.device is Device.cpu or not devices.gpus else devices.gpus


def _batch_words(config: RunConfig, counts: list[int], hold: str, problems: list[Problem]) -> list[str]:
    """What keeps the global batch, or that of a process, the same for every number of processes."""
    trainer = config.trainer
    rows, accumulation = trainer.per_device_train_batch_size, trainer.gradient_accumulation_steps
    wanted = trainer.global_batch_size
    if hold == GLOBAL:
        if wanted is None and rows != AUTO:
            wanted = rows * (accumulation or 1) * max(counts)
        if wanted is None:
            return []  # refused with the rest of the config's rules
        return [f"trainer.global_batch_size={wanted}", "trainer.gradient_accumulation_steps=null"]
    if rows == AUTO:
        why = "it would be another one for each number of processes, and --hold micro keeps it"
        problems.append(Problem(f"trainer.per_device_train_batch_size={AUTO}", why, "Set a number."))
    elif accumulation is None and wanted is not None:
        one_pass = rows * min(counts)
        if wanted % one_pass:
            why = f"{rows} per device x {min(counts)} at the smallest number of processes does not divide it"
            problems.append(Problem(f"trainer.global_batch_size={wanted}", why, "Use a multiple."))
        accumulation = wanted // one_pass
    return ["trainer.global_batch_size=null", f"trainer.gradient_accumulation_steps={accumulation or 1}"]


def _checked(
    words: list[str], listed: bool, strategy: str, count: int, problems: list[Problem]
) -> Wanted | None:
    """One run, checked; what is wrong with it is added to the problems."""
    own = [f"{COUNTS}{count}", f"run_name={count}-{strategy}"]
    chosen = [f"{STRATEGIES}{strategy}"] if listed else []
    try:
        return Wanted(count, strategy, check_run([*words, *own, *chosen]))
    except Refusal as refused:
        problems += refused.problems
        return None


def _refuse_unfit(wanted: list[Wanted], subject: str) -> None:
    """One run of several would say nothing."""
    unfit = [one for one in wanted if one.unfit]
    if not unfit or len(wanted) - len(unfit) > 1:
        return
    told = [Problem(f"{one.num_processes} x {one.requested}", one.unfit) for one in unfit]
    raise DoesNotFit(told, f"{subject}: fewer than two runs fit, and nothing can be compared")
