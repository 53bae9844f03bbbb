"""Is this machine any good? Answered in a second or two by a bare Python, with nothing installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from finetune.doctor.cards import card_checks
from finetune.doctor.check import Check
from finetune.doctor.host import host_checks, shared_memory_check
from finetune.errors import UserError
from finetune.hardware.survey import MachineReport, probe_machine

DEFAULT_FOLDER = "runs"


def quick_checks(overrides: list[str]) -> tuple[MachineReport, Iterator[Check]]:
    """Look at the machine alone.

    Raises:
        UserError: a key other than `output_dir`.
    """
    report = probe_machine(_folder(overrides))
    return report, iter([*card_checks(report), *host_checks(report), shared_memory_check(report)])


def _folder(overrides: list[str]) -> Path:
    folder = DEFAULT_FOLDER
    for override in overrides:
        key, _, value = override.partition("=")
        if key != "output_dir":
            raise UserError(
                f"{override}: doctor --quick looks at the machine alone; its one key is output_dir=FOLDER.\n"
                "    Without --quick doctor checks the machine for the run that the words describe."
            )
        folder = value or DEFAULT_FOLDER
    return Path(folder)
