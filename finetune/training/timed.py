"""The worker of `finetune scale`: the first steps of a run, timed and then profiled; nothing is saved.

`python -m finetune.training.timed RUN_DIR`, in every process that the launcher started.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback, TrainerControl, TrainerState

from finetune.config.facts import load_facts
from finetune.config.saved import load_config
from finetune.distributed.world import gather_objects
from finetune.paths import RunDir
from finetune.report.record import Report
from finetune.training.callbacks import Checkpoints, StopSignals
from finetune.training.process import run_process, strategy_environment
from finetune.training.timing import (
    PROFILED,
    PROFILER_START,
    WARM_UP,
    Interval,
    RankTiming,
    seconds_alone,
)
from finetune.training.trainer import RunTrainer
from finetune.training.worker import build


def run(run_dir: RunDir) -> int:
    """Make the steps of a run as its own worker does, and write what was measured into the report."""
    config, facts = load_config(run_dir.config), load_facts(run_dir.facts)
    report = Report(run_dir)
    with strategy_environment(config, facts, run_dir) as world:
        trainer, _, _ = build(config, facts, run_dir, report, StopSignals())
        trainer.remove_callback(Checkpoints)  # it saves at the end, and needs the disk for it
        clock = Clock(trainer)
        trainer.add_callback(clock)
        trainer.go(None)
        ranks = gather_objects(asdict(clock.timing))
    if world.is_main:
        report.update(status="measured", timing={"tokens": clock.tokens, "ranks": ranks})
        report.write()
    return 0


class Clock(TrainerCallback):
    """Times each step of this process, and looks into the last ones for collectives."""

    def __init__(self, trainer: RunTrainer) -> None:
        self.trainer = trainer
        self.timing = RankTiming([], [], [], [], 0)
        self.tokens: list[int] = []
        """Of each timed step, over all processes."""
        self.last_end = self.waiting_since = time.perf_counter()
        self.data_seconds = 0.0
        self.profiler: profile | None = None
        self.profiled_ends: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.data_seconds = time.perf_counter() - self.waiting_since

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.waiting_since = time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        now, step = time.perf_counter(), state.global_step
        last_timed = state.max_steps - PROFILED - PROFILER_START
        if WARM_UP < step <= last_timed:
            self.timing.step_seconds.append(now - self.last_end)
            self.timing.data_seconds.append(self.data_seconds)
            window = self.trainer.sampler.window(step - 1)
            self.tokens.append(int(self.trainer.row_lengths[window].sum()))
        if step == last_timed:
            self._start_profiler(args.device.type)
        elif step > last_timed:
            self.profiled_ends.append(time.time_ns())
        if step == state.max_steps:
            self._read_profiler(args.device.type)
        self.last_end = self.waiting_since = time.perf_counter()

    def _start_profiler(self, device: str) -> None:
        peak = max(self.trainer.peaks.highest.values())  # the profiler's own memory is not the run's
        measured = self.timing
        self.timing = RankTiming(measured.step_seconds, measured.data_seconds, [], [], peak)
        # kernels alone where there are any: to follow the Python code as well would slow it down
        kind = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
        self.profiler = profile(activities=[kind])
        self.profiler.start()

    def _read_profiler(self, device: str) -> None:
        assert self.profiler is not None
        self.profiler.stop()
        collectives, work = intervals_of(self.profiler.profiler.kineto_results.events(), device)
        for begin, end in zip(self.profiled_ends, self.profiled_ends[1:], strict=False):
            self.timing.profiled_seconds.append((end - begin) / 1e9)
            self.timing.communication_seconds.append(seconds_alone(collectives, work, (begin, end)))


def intervals_of(events: list[Any], device: str) -> tuple[list[Interval], list[Interval]]:
    """Collectives, and everything else that computes or copies.

    CUDA: what ran on the card, NCCL's kernels being named for it. CPU: gloo's work, from the thread that does
    it, and torch's operations on tensors.
    """
    collectives, work = [], []
    on_card = device == "cuda"
    for event in events:
        if (event.device_type() == DeviceType.CUDA) is not on_card:
            continue
        if on_card and event.is_user_annotation():
            continue  # a name for a stretch of time, no kernel
        name, interval = event.name(), (event.start_ns(), event.end_ns())
        if name.startswith("nccl" if on_card else "gloo:"):
            collectives.append(interval)
        elif on_card or name.startswith("aten::"):
            work.append(interval)
    return collectives, work


if __name__ == "__main__":
    run_process(RunDir(Path(sys.argv[1])), run)
