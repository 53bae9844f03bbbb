"""A LoRA run of ours against plain `trl sft`: same model, rows, threads and precision, in turn (A B A B ...).

    python benchmarks/speed.py [--rounds 3] [--steps 20] [--threads N] [--packed | --unpacked] [--json]

Both are whole processes started from their command lines. Steady speed is non-padding tokens per second over
the optimizer steps after the first five, counted by the same observer inside both (a `sitecustomize` hook
that wraps `Trainer.training_step` and reads the clock after every optimizer step); the time to the first step
is counted from the start of the command. Only the ratio of a pair is meaningful: absolute figures move
between machines.
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
import time
from pathlib import Path
from typing import Any

from workload import REPOSITORY, environment, make_workload

BATCH, LENGTH, RANK = 4, 512, 16

OBSERVER = """
import atexit, json, os, time
out = os.environ.get("SPEED_OUT")
if out:
    import importlib.abc, importlib.util, sys

    marks = []

    def observe(module):
        trainer = module.Trainer
        step = trainer.training_step

        def counted(self, model, inputs, *args, **kwargs):
            mask = inputs.get("attention_mask")
            tokens = int(mask.sum()) if mask is not None else int(inputs["input_ids"].numel())
            result = step(self, model, inputs, *args, **kwargs)
            marks.append((time.time(), tokens))
            return result

        trainer.training_step = counted

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name != "transformers.trainer":
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            execute = spec.loader.exec_module
            def exec_module(module):
                execute(module)
                observe(module)
            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder())

    def write():
        if marks:
            json.dump(marks, open(out, "w"))

    os_exit = os._exit
    def leave(code):
        write()
        os_exit(code)
    os._exit = leave
    atexit.register(write)
"""


def ours(work: Path, data: Path, packed: bool, steps: int) -> list[str]:
    """The command line of our run."""
    return [
        *(sys.executable, "-m", "finetune", "adapter=lora"),
        *(f"adapter.r={RANK}", f"adapter.lora_alpha={2 * RANK}"),
        *(f"model.name_or_path={work / 'model'}", "model.cpu=true", "launch.device=cpu"),
        f"data.train=[{{path: {data}}}]",
        *(f"data.max_length={LENGTH}", "data.too_long=truncate", "data.loss_on=all"),
        *(f"data.packing={str(packed).lower()}", f"trainer.max_steps={steps}"),
        *(f"trainer.per_device_train_batch_size={BATCH}", "trainer.learning_rate=1e-4"),
        f"output_dir={work / 'ours'}",
    ]


def theirs(work: Path, data: Path, packed: bool, steps: int) -> list[str]:
    """The same job for trl's own command line."""
    return [
        *(sys.executable, "-c", "from trl.cli import main; main()", "sft"),
        *("--model_name_or_path", str(work / "model")),
        *("--dataset_name", str(data.parent), "--output_dir", str(work / "theirs")),
        *("--use_peft", "--lora_target_modules", "all-linear"),
        *("--lora_r", str(RANK), "--lora_alpha", str(2 * RANK)),
        *("--max_length", str(LENGTH), "--packing", str(packed), "--max_steps", str(steps)),
        *("--per_device_train_batch_size", str(BATCH), "--learning_rate", "1e-4", "--logging_steps", "1"),
        *("--bf16", "False", "--use_cpu", "True", "--gradient_checkpointing", "False", "--report_to", "none"),
        *("--save_strategy", "no", "--lora_dropout", "0.0", "--dtype", "float32"),
    ]


def run_once(command: list[str], work: Path, threads: int) -> dict[str, float]:
    """One whole process with empty caches; tokens per second after five steps, and seconds to the first."""
    observer, out = work / "observer", work / "marks.json"
    observer.mkdir(exist_ok=True)
    (observer / "sitecustomize.py").write_text(OBSERVER, encoding="utf-8")
    out.unlink(missing_ok=True)
    for cache in ("cache", "ours", "theirs"):
        shutil.rmtree(work / cache, ignore_errors=True)
    settings = environment(
        work,
        PYTHONPATH=os.pathsep.join([str(observer), str(REPOSITORY)]),
        SPEED_OUT=str(out),
        OMP_NUM_THREADS=str(threads),
    )
    started = time.time()
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False, cwd=work)
    if done.returncode != 0 or not out.exists():
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    marks = json.loads(out.read_text(encoding="utf-8"))
    steady = marks[5:]
    seconds = steady[-1][0] - steady[0][0]
    return {
        "tokens_per_second": sum(tokens for _, tokens in steady[1:]) / seconds,
        "first_step_seconds": marks[0][0] - started,
        "whole_seconds": time.time() - started,
    }


def compare(work: Path, packed: bool, rounds: int, steps: int, threads: int) -> dict[str, Any]:
    """Pairs of runs in turn, and the ratio of each pair."""
    data = work / "data" / "train.jsonl"
    pairs = []
    for number in range(rounds):
        pair = {
            "ours": run_once(ours(work, data, packed, steps), work, threads),
            "trl": run_once(theirs(work, data, packed, steps), work, threads),
        }
        pairs.append(pair)
        ratio = pair["ours"]["tokens_per_second"] / pair["trl"]["tokens_per_second"]
        print(f"{'packed' if packed else 'unpacked'} pair {number + 1}: {ratio:.2f}x", file=sys.stderr)
    ratios = [p["ours"]["tokens_per_second"] / p["trl"]["tokens_per_second"] for p in pairs]
    earlier = [p["trl"]["first_step_seconds"] - p["ours"]["first_step_seconds"] for p in pairs]
    return {
        "packed": packed,
        "pairs": pairs,
        "speed_ratio": statistics.median(ratios),
        "first_step_earlier_seconds": statistics.median(earlier),
    }


def main() -> None:
    """Print a line for each layout, or one JSON object."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true")
    layouts = parser.add_mutually_exclusive_group()
    layouts.add_argument("--packed", action="store_true")
    layouts.add_argument("--unpacked", action="store_true")
    arguments = parser.parse_args()
    wanted = [True] if arguments.packed else [False] if arguments.unpacked else [False, True]
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        make_workload(work)
        sizes = arguments.rounds, arguments.steps, arguments.threads
        results = [compare(work, packed, *sizes) for packed in wanted]
    if arguments.json:
        print(json.dumps({"layouts": results}))
        return
    for result in results:
        layout = "packed" if result["packed"] else "unpacked"
        speed, earlier = result["speed_ratio"], result["first_step_earlier_seconds"]
        print(f"{layout:9} {speed:.2f}x the tokens/s of trl sft; first step {earlier:+.1f} s earlier")


if __name__ == "__main__":
    main()
