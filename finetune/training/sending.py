"""The process that brings a run off its machine, as the run sees it: begun beside it, awaited at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import Any

from finetune.config.schema import RunConfig
from finetune.distributed.launch import STOPPING
from finetune.distributed.parent import end_with_parent
from finetune.paths import RunDir
from finetune.progress import stage
from finetune.remote.address import whole_address
from finetune.report.record import Report, read_report
from finetune.secrets import masked, masked_file
from finetune.training.remote_run import FINISH


class Sending:
    """Nothing, where `checkpoint.remote` is not set. Leaving the `with` block ends the process."""

    def __init__(self, config: RunConfig, run_dir: RunDir, say: Callable[[str], None]) -> None:
        self.config = config
        self.run_dir = run_dir
        self.say = say
        self.process: subprocess.Popen[bytes] | None = None
        self.bears = 0
        """Signals that are only told before one ends the waiting."""

    def __enter__(self) -> Sending:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def start(self) -> None:
        """Begin: of several machines that share the folder machine 0 sends it."""
        if self.config.checkpoint.remote is None or self.config.launch.machine_rank > 0:
            return
        paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._errors = masked_file(self.run_dir.upload_log)
        assert self._errors.stdin is not None
        with self._errors.stdin as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "finetune.training.upload", str(self.run_dir.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # what stops the run does not stop what saves it
                preexec_fn=end_with_parent,
            )
        self._relaying = Thread(target=self._pass_on, daemon=True)
        self._relaying.start()

    def finish(self, exit_code: int, *, at_once: bool = False) -> str:
        """Wait until all that the run has left is in the store and verified; what is wrong otherwise.

        A signal that comes while it waits is told, and the next one ends the waiting; after a run that a
        signal has stopped the first one does. `at_once`: it has been ended already.
        """
        if self.process is None:
            return ""
        if at_once:
            self.process.kill()
        elif self.process.poll() is not None:
            self.say(f"WARNING   sending had ended by itself (see {self.run_dir.upload_log}); begun again")
            self.start()
        self.bears = 0 if exit_code > 128 else 1
        before = self._listen_to_signals()
        try:
            assert self.process.stdin is not None
            with suppress(OSError):  # it may have ended by itself
                self.process.stdin.write(FINISH)
                self.process.stdin.flush()
            with stage("uploading what is left"):
                self.process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        self._relaying.join(timeout=5)
        with suppress(subprocess.TimeoutExpired):
            self._errors.wait(timeout=5)
        return "" if self.process.returncode == 0 else self._lost()

    def _lost(self) -> str:
        """Say where the whole copy is, in the report too."""
        assert self.config.checkpoint.remote is not None
        where = f"{whole_address(self.config.checkpoint.remote)}/{self.run_dir.path.name}"
        known = read_report(self.run_dir) if self.run_dir.report.exists() else {}
        about = known.get("remote") or {}
        if "error" not in about:
            stopped = f"sending was ended before all was there; see {self.run_dir.upload_log}"
            about = {"address": where, "checkpoints": [], "model": False, **about, "verified": False}
            about["error"] = stopped
            Report(self.run_dir, {**known, "remote": about}).write()
        again = f"checkpoint.resume=auto run_name={self.run_dir.path.name}"
        return (
            f"the run is not whole at {where}: {about['error']}\n"
            f"  The whole copy is on this machine: {self.run_dir.path}\n"
            f"  Send the rest with the same command and {again}"
        )

    def _listen_to_signals(self) -> dict[int, Any]:
        if current_thread() is not main_thread():  # elsewhere signals stay with whoever owns them
            return {}
        before: dict[int, Any] = {number: signal.signal(number, self._on_signal) for number in STOPPING}
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return before

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        assert self.process is not None
        if self.bears == 0:
            self.process.kill()
            return
        self.bears -= 1
        self.say(f"{signal.Signals(number).name}: the rest is being sent (again: end at once)")

    def _pass_on(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        with self.run_dir.upload_log.open("a", encoding="utf-8") as log:
            for raw in self.process.stdout:
                line = masked(raw.decode("utf-8", errors="replace").rstrip("\n"))
                log.write(f"{line}\n")
                log.flush()
                self.say(line)
