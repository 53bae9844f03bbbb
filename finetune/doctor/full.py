"""Is this machine all right for this run? Every check: cards, host, software, network, and the run itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from finetune.config.case import Lack
from finetune.config.compose import compose
from finetune.config.schema import RunConfig
from finetune.distributed.outer import refuse_launcher
from finetune.doctor.cards import card_checks
from finetune.doctor.check import FAIL, PASS, Check
from finetune.doctor.exchange import collective_checks, port_check
from finetune.doctor.host import host_checks, shared_memory_check
from finetune.doctor.inputs import input_checks, refused
from finetune.doctor.network import network_checks
from finetune.doctor.run import link_check, run_checks
from finetune.doctor.software import version_check
from finetune.errors import Refusal, UserError
from finetune.hardware.machine import UnknownCard
from finetune.hardware.survey import MachineReport, probe_machine
from finetune.planner.read_shape import UnknownSizes
from finetune.training.start import CheckedRun, check_run

SMALLEST = "recipe=tiny_lora"
"""Without a recipe or a model the machine is checked for the smallest run that there is."""


def full_checks(overrides: list[str]) -> tuple[MachineReport, Iterator[Check]]:
    """Look at the machine; what is checked comes as it is known, the start of what the run would start last.

    Raises:
        UserError: the words themselves are wrong.
    """
    refuse_launcher("doctor")
    named = any(word.startswith(("recipe=", "model=", "model.name_or_path=")) for word in overrides)
    words = overrides if named else [SMALLEST, *overrides]
    config, run = _checked(words)
    report = probe_machine(Path(config.output_dir))
    meant = [] if named else [Check("checked for", PASS, f"{SMALLEST}: no recipe was named")]
    return report, _checks(meant, config, run, report)


def _checks(
    meant: list[Check], config: RunConfig, run: CheckedRun | list[Check], report: MachineReport
) -> Iterator[Check]:
    yield from meant
    yield from card_checks(report, link_check(run, report) if isinstance(run, CheckedRun) else None)
    yield from host_checks(report)
    yield version_check()
    yield from network_checks(config)
    if not isinstance(run, CheckedRun):
        yield from [*run, *filter(None, [port_check(config.launch)]), shared_memory_check(report)]
        return
    yield from run_checks(run, report)
    yield from input_checks(run)
    exchanged = False
    for check in collective_checks(run):
        exchanged = exchanged or (check.name == "exchange" and check.status != FAIL)
        yield check
    yield shared_memory_check(report, exchanged=exchanged)


def _checked(words: list[str]) -> tuple[RunConfig, CheckedRun | list[Check]]:
    """The run, or what it would be refused for on this machine."""
    try:
        run = check_run(words)
    except UserError as error:
        composed = compose(words, problems=[])  # they are in `error`
        if isinstance(error, Refusal) and error.subject == composed.subject and not _of_machine(error):
            raise
        return composed.config, refused("recipe", error)
    return run.config, run


def _of_machine(refusal: Refusal) -> bool:
    """Whether the words could be done on another machine."""
    unknown = isinstance(refusal, (UnknownCard, UnknownSizes))
    return unknown or all(isinstance(problem, Lack) for problem in refusal.problems)
