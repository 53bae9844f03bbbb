"""Saves beside training: each rank copies what it holds, training goes on, and a thread writes the copy.

Where the copy does not fit into the host's memory, training waits while the files are written one by one.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainingArguments

from finetune.config.schema import CheckpointConfig
from finetune.distributed.world import gather_objects
from finetune.hardware.memory import free_bytes
from finetune.paths import RunDir
from finetune.training.checkpoint import (
    FAILED,
    PART,
    Entry,
    cannot_write,
    entry_of,
    publish,
    seal,
    state_file,
    state_files_of,
)
from finetune.training.live import Live
from finetune.training.room import too_small
from finetune.training.rows import rows_read
from finetune.training.state_files import FILE_BYTES, Part, on_cpu, own_bytes, parts, write_file

log = logging.getLogger(__name__)

SPARE = 1.05
"""How much more than the tensors a checkpoint takes on the disk."""

MEMORY_SHARE = 0.5
"""Part of the machine's free memory that copies of all its ranks may take."""

LONGEST_SAVE = timedelta(days=1)
"""How long ranks wait for each other's files; `trainer.ddp_timeout` is for steps."""


class Saving:
    """The checkpoints of a run, from one rank's side; every rank calls the same methods in the same order."""

    def __init__(self, run_dir: RunDir, keep: int, arguments: TrainingArguments) -> None:
        self.checkpoints = run_dir.checkpoints
        self.run_dir = run_dir
        self.keep = keep
        self.rank = arguments.process_index
        self.world_size = arguments.world_size
        self.local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.waited_seconds = 0.0
        """How long training has waited for saves."""
        self.longest_seconds = 0.0
        """The longest save so far, from its begin to the moment that it could be seen."""
        self.saved = 0
        self._group = None
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=LONGEST_SAVE)
        self._thread: threading.Thread | None = None
        self._failed: Exception | None = None

    @contextmanager
    def beside(self) -> Iterator[Path]:
        """The folder that a checkpoint is written in before it is seen; a failure here ends the run."""
        folder = self.checkpoints / PART
        try:
            if self.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
            self._barrier()
            yield folder
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise cannot_write(self.checkpoints, error) from error

    def prove(self, live: Live, checkpoint: CheckpointConfig) -> None:
        """Once the optimizer has made its states: all of them can be saved, and the disk has room for what
        will be kept.
        """
        live.settings()
        size = self._size(live)
        lacking = too_small(checkpoint, self.run_dir, size) if self.rank == 0 else None
        lacking = gather_objects(lacking)[0]
        if lacking is not None:
            raise lacking

    def lacking(self, live: Live) -> str:
        """What the disk lacks for one more checkpoint, in words; empty: it has room. Rank 0's disk counts."""
        needed = self._size(live)
        free = gather_objects(shutil.disk_usage(self.checkpoints).free)[0]
        if needed <= free:
            return ""
        return f"a checkpoint takes {needed / 1e9:,.3f} GB, and {free / 1e9:,.3f} GB are free"

    def write(self, live: Live, step: int, best: dict[str, Any] | None) -> None:
        """Write the state of this moment, beside training where memory allows."""
        started = time.perf_counter()
        about = {"num_processes": self.world_size, "best": best, "rows": rows_read(self.run_dir)}
        own = own_bytes(live, self.rank, self.world_size)
        needed = (
            own + min(own, FILE_BYTES)
        ) * self.local_ranks  # the copy, and the file that is being written
        fits = all(gather_objects(needed <= free_bytes() * MEMORY_SHARE))
        found: Iterable[Part] = parts(live, self.rank, self.world_size)
        copies: Iterable[Part] = [on_cpu(part) for part in found] if fits else map(on_cpu, found)
        self._barrier()  # every rank has written its small files
        arguments = (copies, step, about, started)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()
        self.waited_seconds += time.perf_counter() - started
        if not fits:
            self.wait()

    def check(self) -> None:
        """Raise what has gone wrong beside training."""
        if isinstance(self._failed, OSError):
            raise cannot_write(self.checkpoints, self._failed) from self._failed
        if self._failed is not None:
            raise self._failed

    def wait(self) -> None:
        """Until the save that is under way is whole on the disk; raises what went wrong."""
        started = time.perf_counter()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
        self._barrier()
        self.waited_seconds += time.perf_counter() - started

    def finish_alone(self, seconds: float) -> None:
        """Give the save that is under way some time to become whole: this rank is about to end."""
        if self._thread is not None:
            self._thread.join(timeout=seconds)

    def _barrier(self) -> None:
        """Wait for every rank, for as long as a slow disk takes."""
        if self._group is not None:
            dist.barrier(group=self._group)

    def _size(self, live: Live) -> int:
        """Bytes of a checkpoint now."""
        return int(sum(gather_objects(own_bytes(live, self.rank, self.world_size))) * SPARE)

    def _write(self, copies: Iterable[Part], step: int, about: dict[str, Any], started: float) -> None:
        folder = self.checkpoints / PART / f"checkpoint-{step}"
        try:
            entries: dict[str, Entry] = {}
            for number, part in enumerate(copies):
                name = state_file(self.rank, number)
                entries[name] = write_file(folder / name, part)
            for file in self._small_files(folder):
                entries[str(file.relative_to(folder))] = entry_of(file)
            seal(folder, self.rank, entries)
            if self.rank == 0:
                size = publish(folder, self.checkpoints, self.keep, about)
                self.saved += 1
                seconds = time.perf_counter() - started
                log.info(
                    "saved     %s (%.1f MB, %.1f s)", self.checkpoints / folder.name, size / 1e6, seconds
                )
        except Exception as error:  # noqa: BLE001 - it is raised in the main thread by `check`
            self._failed = error
            for file in state_files_of(folder, self.rank):  # never whole now: room for what is told of it
                file.unlink(missing_ok=True)
            with suppress(OSError):  # rank 0 need not wait for this rank's mark
                (folder / f"{FAILED}{self.rank}").write_text(str(error), encoding="utf-8")
        self.longest_seconds = max(self.longest_seconds, time.perf_counter() - started)

    def _small_files(self, folder: Path) -> list[Path]:
        """What this rank has written itself beside the tensors: random numbers; rank 0 the rest."""
        random_numbers = {f"rng_state_{self.rank}.pth", "rng_state.pth" if self.rank == 0 else ""}
        files = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
        own = [file for file in files if file.name in random_numbers]
        others = [file for file in files if not file.name.startswith("rng_state")] if self.rank == 0 else []
        return [*own, *others]
