"""What checkpoints cost a run: the same full fine-tuning with and without them, in turn (A B A B ...).

    python benchmarks/saving.py [--rounds 3] [--steps 24] [--every 4] [--threads N] [--batch 6] [--json]

Steps are timed from the run's own `metrics.jsonl` (a save falls into the step that follows it). The extra
time for each save, copying and the writing beside the steps, is set against `checkpoint.every_minutes`, 30 by
default. Uploads are not part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from workload import environment, make_workload

INTERVAL_SECONDS = 30 * 60


def run_once(work: Path, steps: int, batch: int, threads: int, every: int | None) -> dict[str, float]:
    """One whole process; seconds of its steps from the second on, and what its report says of saves."""
    shutil.rmtree(work / "runs", ignore_errors=True)
    command = [
        *(sys.executable, "-m", "finetune", "adapter=full", "run_name=run", f"output_dir={work / 'runs'}"),
        *(f"model.name_or_path={work / 'model'}", "model.cpu=true", "launch.device=cpu"),
        *(f"data.train=[{{path: {work / 'data' / 'train.jsonl'}}}]", "data.max_length=512"),
        *("data.too_long=truncate", "data.loss_on=all", f"trainer.max_steps={steps}"),
        *(f"trainer.per_device_train_batch_size={batch}", "trainer.learning_rate=1e-4"),
        *("checkpoint.every_minutes=null", f"checkpoint.every_steps={every or 'null'}"),
    ]
    done = subprocess.run(
        command,
        env=environment(work, OMP_NUM_THREADS=str(threads)),
        capture_output=True,
        text=True,
        check=False,
        cwd=work,
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    lines = (work / "runs" / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    made = [json.loads(line) for line in lines]
    seconds = [
        (now["tokens"] - before["tokens"]) / now["tokens_per_second"] for before, now in pairwise(made)
    ]
    report = json.loads((work / "runs" / "run" / "report.json").read_text(encoding="utf-8"))
    folder = max((work / "runs" / "run" / "checkpoints").iterdir())
    return {
        "seconds": sum(seconds),
        "step_seconds": statistics.median(seconds),
        "waited_seconds": report["checkpoints"]["waited_seconds"],
        "saves": report["checkpoints"]["saved"] - 1,  # the last one lies behind the last step
        "bytes": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
    }


def compare(work: Path, rounds: int, steps: int, batch: int, threads: int, every: int) -> dict[str, Any]:
    """Pairs of runs in turn, and what one save costs in each pair."""
    pairs, costs = [], []
    for number in range(rounds):
        pair = {
            "without": run_once(work, steps, batch, threads, None),
            "with": run_once(work, steps, batch, threads, every),
        }
        pairs.append(pair)
        costs.append((pair["with"]["seconds"] - pair["without"]["seconds"]) / pair["with"]["saves"])
        print(f"pair {number + 1}: {costs[-1]:.3f} s a save", file=sys.stderr)
    cost = statistics.median(costs)
    return {
        "pairs": pairs,
        "seconds_a_save": cost,
        "waited_seconds_a_save": statistics.median(
            p["with"]["waited_seconds"] / (p["with"]["saves"] + 1) for p in pairs
        ),
        "step_seconds": statistics.median(p["without"]["step_seconds"] for p in pairs),
        "bytes": pairs[-1]["with"]["bytes"],
        "share_at_default_interval": cost / INTERVAL_SECONDS,
        "share_at_one_a_minute": cost / 60,
    }


def main() -> None:
    """Print one line, or one JSON object."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        make_workload(work)
        found = compare(work, wanted.rounds, wanted.steps, wanted.batch, wanted.threads, wanted.every)
    if wanted.json:
        print(json.dumps(found))
        return
    print(
        f"steps of {found['step_seconds']:.2f} s; a checkpoint of {found['bytes'] / 1e6:.0f} MB costs "
        f"{found['seconds_a_save']:.3f} s of training: {found['share_at_default_interval']:.3%} of it at one "
        f"in 30 minutes, {found['share_at_one_a_minute']:.2%} at one a minute"
    )


if __name__ == "__main__":
    main()
