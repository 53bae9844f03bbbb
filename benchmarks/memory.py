"""Forecast against measured memory on CPU processes: nine strategies, by torch's own count of allocations.

    python benchmarks/memory.py [--model FOLDER] [--method full|lora] [--strategies ddp,zero3] [--json]

Each run makes two optimizer steps on full rows under torch's profiler, which sees every allocation of every
process, autograd's and the communication libraries' among them. Without a model it is the embedded one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from finetune.config.strategy import TRAITS  # noqa: E402 (the checkout beside this file, installed or not)

STRATEGIES = [strategy.value for strategy in TRAITS]
ROW_TOKENS = {"tiny": 256, "model": 512}

IN_THIS_THREAD = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}
"""transformers loads weights in threads of its own, which the profiler does not see."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model; its sizes are read from it")
    parser.add_argument("--method", choices=["full", "lora"], default="full")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for strategy in arguments.strategies.split(","):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measured(strategy, arguments.model, arguments.method, Path(folder)))
        if not arguments.json:
            print(line(rows[-1]), flush=True)
    if arguments.json:
        print(json.dumps(rows))
    return 0


def measured(strategy: str, model: Path | None, method: str, folder: Path) -> dict[str, Any]:
    """One run: what was planned and what was taken, in bytes, by phase; the highest of all processes."""
    processes = 1 if strategy == "single" else 2
    length = ROW_TOKENS["model" if model else "tiny"]
    words = [f"recipe=tiny_{method}", f"distributed={strategy}", "launch.device=cpu", "trainer.max_steps=2"]
    words += [f"data.max_length={length}", "data.packing=true", "trainer.per_device_train_batch_size=1"]
    words += [f"trainer.global_batch_size={processes}", "trainer.learning_rate=1e-6", f"output_dir={folder}"]
    words += [f"model.name_or_path={model}", "model.cpu=true"] if model else []
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [*launch, str(Path(__file__)), "--worker", str(folder), *words, "run_name=run"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **IN_THIS_THREAD}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    peaks = [json.loads(file.read_text()) for file in sorted(folder.glob("peaks.*.json"))]
    if len(peaks) != processes:
        raise SystemExit(f"{strategy} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    report = json.loads((folder / "run" / "report.json").read_text())
    assert report["strategy"]["actual"] == strategy
    assert report["num_processes"]["actual"] == processes
    forecast = json.loads((folder / "run" / "plan.json").read_text())["forecast"]
    highest = {phase: max(own.get(phase, 0) for own in peaks) for phase in forecast["tensors"]}
    return {"strategy": strategy, "processes": processes, "planned": forecast["tensors"], "measured": highest}


def line(row: dict[str, Any]) -> str:
    planned, taken = max(row["planned"].values()), max(row["measured"].values())
    phases = "  ".join(
        f"{phase} {row['planned'][phase] / 1e6:,.0f}/{size / 1e6:,.0f}"
        for phase, size in row["measured"].items()
    )
    return (
        f"{row['strategy']:14} x{row['processes']}  planned {planned / 1e6:9,.1f} MB  "
        f"measured {taken / 1e6:9,.1f} MB  {planned / taken - 1:+6.1%}   {phases}"
    )


def worker(folder: Path, words: list[str]) -> None:
    """Inside a process of the run: torch's profiler counts, the run's own phases divide the time."""
    import time

    from torch.profiler import ProfilerActivity, profile

    import finetune
    from finetune.training.peaks import Peaks

    ends: list[tuple[int, str]] = []
    end = Peaks.end

    def marked(peaks: Peaks, phase: str) -> None:
        ends.append((time.time_ns(), phase))
        end(peaks, phase)

    Peaks.end = marked  # type: ignore[method-assign]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as profiler:
        finetune.train(*words)
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    highest: dict[str, int] = {}
    held, position = 0, 0
    for moment, size in changes:
        while position < len(ends) and ends[position][0] <= moment:
            position += 1
        held += size
        if position < len(ends):
            phase = ends[position][1]
            highest[phase] = max(highest.get(phase, 0), held)
    (folder / f"peaks.{os.environ['RANK']}.json").write_text(json.dumps(highest))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main())
