"""The user's own commands at the end of a run: stop the rented machine, send a message."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from finetune.config.schema import RunConfig
from finetune.paths import RunDir
from finetune.report.record import last_step, read_report
from finetune.secrets import masked

TIMEOUT_SECONDS = 600


def run_hook(config: RunConfig, run_dir: RunDir, exit_code: int, say: Callable[[str], None]) -> None:
    """Run `on_end` after a run that ended well, `on_failure` after any other; its failure is only told.

    Of several machines only machine 0 does it, which knows whether the model is saved and verified.
    """
    hooks = config.hooks
    name, command = ("on_end", hooks.on_end) if exit_code == 0 else ("on_failure", hooks.on_failure)
    if command is None or config.launch.machine_rank > 0:
        return
    say(f"hook      {name}: {command}")
    try:
        process = subprocess.Popen(
            command,
            shell=True,
            cwd=run_dir.path,
            env={**os.environ, **_facts(run_dir, exit_code)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # what ends the run does not end it, and it can be ended whole
        )
    except OSError as error:
        say(f"WARNING   hooks.{name} could not be started: {error}; the run's own result stands")
        return
    try:
        printed, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        say(f"WARNING   hooks.{name} was ended after {TIMEOUT_SECONDS} s; the run's own result stands")
        return
    for line in printed.splitlines():
        say(f"          {masked(line)}")
    if process.returncode != 0:
        say(f"WARNING   hooks.{name} failed with exit code {process.returncode}; the run's own result stands")


def _facts(run_dir: RunDir, exit_code: int) -> dict[str, str]:
    """What the command is told, in its environment."""
    report: dict[str, Any] = {}
    if run_dir.report.exists():
        with suppress(ValueError):
            report = read_report(run_dir)
    made = last_step(run_dir)
    loss = (report.get("loss") or {}).get("last", made.get("loss"))
    facts = {
        "RUN_DIR": run_dir.path,
        "RUN_NAME": run_dir.path.name,
        "EXIT_CODE": exit_code,
        "STATUS": report.get("status", "failed"),
        "STEPS": report.get("steps", made.get("step", 0)),
        "LOSS": "" if loss is None else loss,
        "MODEL": report.get("model_path") or "",
    }
    return {f"FINETUNE_{name}": str(value) for name, value in facts.items()}
