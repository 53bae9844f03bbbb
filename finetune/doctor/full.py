"""Is this machine all right for this run? Every check: cards, host, software, network, and the run itself."""

from __future__ import annotations

from pathlib import Path

from finetune.config.compose import compose
from finetune.distributed.outer import refuse_launcher
from finetune.doctor.cards import card_checks
from finetune.doctor.check import FAIL, PASS, Check
from finetune.doctor.exchange import collective_checks, port_check
from finetune.doctor.host import host_checks, shared_memory_check
from finetune.doctor.network import network_checks
from finetune.doctor.run import link_check, run_checks
from finetune.doctor.software import version_check
from finetune.errors import Refusal
from finetune.hardware.survey import MachineReport, probe_machine
from finetune.training.start import CheckedRun, check_run

SMALLEST = "recipe=tiny_lora"
"""Without a recipe or a model the machine is checked for the smallest run that there is."""


def full_checks(overrides: list[str]) -> tuple[list[Check], MachineReport]:
    """Look at the machine, and start what the run would start.

    Raises:
        UserError: the words themselves are wrong.
    """
    refuse_launcher("doctor")
    named = any(word.startswith(("recipe=", "model=", "model.name_or_path=")) for word in overrides)
    words = overrides if named else [SMALLEST, *overrides]
    config = compose(words).config
    report = probe_machine(Path(config.output_dir))
    meant = [] if named else [Check("checked for", PASS, f"{SMALLEST}: no recipe was named")]
    checks = [*meant, *card_checks(report), *host_checks(report)]
    checks += [version_check(), *network_checks(config)]
    run = _checked(words)
    if isinstance(run, CheckedRun):
        checks = [*_judged(checks, link_check(run, report)), *run_checks(run, report)]
        found = collective_checks(run)
        if any(check.name == "exchange" and check.status != FAIL for check in found):
            checks = _judged(checks, shared_memory_check(report, exchanged=True))
        checks += found
    else:
        checks += [*run, *filter(None, [port_check(config.launch)])]
    return checks, report


def _judged(checks: list[Check], by_run: Check | None) -> list[Check]:
    """The checklist with the line on the machine alone replaced by the one on this run, if there is one."""
    return [by_run if by_run is not None and check.name == by_run.name else check for check in checks]


def _checked(words: list[str]) -> CheckedRun | list[Check]:
    """The run, or why `train` would refuse it here."""
    try:
        return check_run(words)
    except Refusal as refusal:
        return [Check("recipe", FAIL, f"{one.where}: {one.why}", one.fix) for one in refusal.problems]
