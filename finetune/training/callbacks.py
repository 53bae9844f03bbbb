"""What happens beside the optimizer steps: proof before step 1, records, checkpoints by time, signals."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.config.schema import CheckpointConfig
from finetune.distributed.launch import STOPPING
from finetune.distributed.world import any_rank, some_rank_failed
from finetune.paths import RunDir, append_whole
from finetune.planner.forecast import LOADING
from finetune.training.live import live_state
from finetune.training.remote_run import upload_seconds
from finetune.training.trainer import RunTrainer

log = logging.getLogger(__name__)

SAME_SIGNAL_SECONDS = 1.0
"""Within this time a second signal is taken for the first one, arriving by another way."""

NOTHING, SAVE, STOP = 0, 1, 2
"""What rank 0 wants of all ranks."""

FIRST_SAVE_SECONDS, SAFETY, END_SECONDS = 60.0, 2.0, 8.0
"""What a save is taken to last before the first one; how many of them are left in time before `stop_at`, and
for the processes to make the page of the run and to end.
"""


class Record(TrainerCallback):
    """One JSON object per logged step in `metrics.jsonl`, written by rank 0 as it happens.

    With the gauges of all ranks: they are lists, which no tracker takes.
    """

    def __init__(self, run_dir: RunDir, trainer: RunTrainer) -> None:
        self.run_dir = run_dir
        self.trainer = trainer
        self.waiting = b""
        """Lines that a full disk did not take yet."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not any(key == "loss" or key.startswith("eval_") for key in logs or {}):
            return  # the Trainer's summary at the end is no step
        entry = {"step": state.global_step, **{k: v for k, v in (logs or {}).items() if k != "total_flos"}}
        entry |= self.trainer.ranks if "loss" in entry else {}
        if args.process_index != 0:
            return
        lines = self.waiting + json.dumps(entry).encode("utf-8") + b"\n"
        try:
            append_whole(self.run_dir.metrics, lines)
        except OSError as error:
            if not self.waiting:
                log.warning("metrics.jsonl cannot be written (%s): kept until it can", error.strerror)
            self.waiting = lines
        else:
            self.waiting = b""


class Counters(TrainerCallback):
    """Counts the tokens of each step before anything is logged, and remembers the highest learning rate."""

    def __init__(self, trainer: RunTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.peaks.end(LOADING)

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **kwargs: Any
    ) -> None:
        self.trainer.highest_rate = max(self.trainer.highest_rate, *lr_scheduler.get_last_lr())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.count_step()


class Checkpoints(TrainerCallback):
    """Asks for a checkpoint by time, by steps, on demand and at the end, and stops the run in time.

    All ranks agree by rank 0's clock and by what it finds: the file `SAVE_NOW` in the run's folder, or that
    `checkpoint.stop_at` is so near that one more step and a save would not fit.
    """

    def __init__(
        self, trainer: RunTrainer, checkpoint: CheckpointConfig, stop_at: float | None, stop: StopSignals
    ) -> None:
        self.trainer = trainer
        self.saving = trainer.saving
        self.checkpoint = checkpoint
        self.stop_at = stop_at
        self.stop = stop
        self.last = self.step_began = time.monotonic()
        left = stop_at - time.time() if stop_at is not None else 0.0
        self.first_save_seconds = min(FIRST_SAVE_SECONDS, left / 10)
        """A guess."""
        self.step_seconds = 0.0
        """The longest from one step's end to the next: an evaluation or a save may lie between."""
        self.last_end: float | None = None
        self.proved = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step_began = time.monotonic()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.saving.check()
        if not self.proved:
            live = live_state(self.trainer)
            self.proved = bool(live.optimizer.state) or not args.fp16  # a step that overflowed makes no state
            if self.proved:
                self.saving.prove(live, self.checkpoint)
        now = time.monotonic()
        since = self.last_end if self.last_end is not None else self.step_began
        self.step_seconds, self.last_end = max(self.step_seconds, now - since), now
        every = self.checkpoint.every_steps
        due = every is not None and state.global_step % every == 0
        wanted = any_rank(self._wanted(now) if args.process_index == 0 else NOTHING)
        if wanted == STOP and state.global_step < state.max_steps:
            self.stop.in_time = signal.SIGTERM
            log.info("stop_at: saving a checkpoint, then ending")
        if due or wanted != NOTHING or state.global_step >= state.max_steps:
            control.should_save = True
            self.last = time.monotonic()

    def _wanted(self, now: float) -> int:
        if self.stop_at is not None:
            save_seconds = self.saving.longest_seconds or self.first_save_seconds
            seconds = save_seconds + upload_seconds(self.saving.run_dir)
            needed = self.step_seconds + SAFETY * seconds + END_SECONDS
            if time.time() + needed >= self.stop_at:
                return STOP
        minutes = self.checkpoint.every_minutes
        asked = self.saving.run_dir.save_now.exists()
        if asked:
            self.saving.run_dir.save_now.unlink(missing_ok=True)
            log.info("SAVE_NOW: saving a checkpoint")
        late = minutes is not None and now - self.last >= minutes * 60
        return SAVE if asked or late else NOTHING


class StopSignals(TrainerCallback):
    """SIGINT, SIGTERM and SIGUSR1 save a checkpoint after the running step and end the run; a second one ends
    at once.

    The ranks agree after every step: a signal does not reach all of them at the same moment. Before the
    first step and after the last there is nothing to save, and after a rank has failed (its launcher then
    signals the others) no step will end: then the process ends at once, rank 0 by way of the run's end.
    """

    def __init__(self) -> None:
        self.received = 0
        self.in_time = 0
        """The signal as which the run ends because its machine goes soon."""
        self.agreed = 0
        """The signal that all ranks stop for; 0: none."""
        self.training = False
        self._received_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in STOPPING:
            self._before[number] = signal.signal(number, self._on_signal)
        self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.training = True

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.agreed = any_rank(self.received or self.in_time)
        if self.agreed:
            control.should_save = True
            control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        if self.agreed:
            control.should_evaluate = False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.training = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received and now - self._received_at < SAME_SIGNAL_SECONDS:
            return  # a launcher passes on what its whole group was sent
        self._received_at = now
        if self.received:
            os._exit(128 + number)
        self.received = number
        if not self.training or some_rank_failed():
            raise SystemExit(128 + number)  # rank 0 may have to send what there is, and to call a hook
        log.info(
            "%s: saving a checkpoint after this step, then ending (again: end at once)",
            signal.Signals(number).name,
        )
