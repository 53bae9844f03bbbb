"""One card in five minutes: doctor, then LoRA, QLoRA and full fine-tuning of half a billion weights.

    python benchmarks/gpu.py [--device cuda|cpu] [--json]

The weights are random, so nothing has to be fetched. Each run tells memory and step time, forecast and
measured, and tokens per second. On a CPU the embedded model stands for the large one.
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
EMBEDDED = REPOSITORY / "finetune" / "embedded" / "tiny"
METHODS = ("lora", "qlora", "full")
STEPS = 12
ROWS = {"cuda": (8, 1024), "cpu": (2, 256)}
"""Rows at once, and tokens of each."""
SIZES = {
    "hidden_size": 1280,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=ROWS, default="cuda")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = half_a_billion(folder / "model") if arguments.device == "cuda" else EMBEDDED
        common = [f"model.name_or_path={model}", "model.cpu=true", f"launch.device={arguments.device}"]
        told: dict[str, Any] = {"doctor": doctor(common, folder), "runs": []}
        for method in METHODS:
            told["runs"].append(measured(method, common, arguments.device, folder))
            if not arguments.json:
                print(line(told["runs"][-1]), flush=True)
    if arguments.json:
        print(json.dumps(told))
    return 0 if told["doctor"]["ok"] else 3


def half_a_billion(folder: Path) -> Path:
    """Qwen3's architecture with random weights in bfloat16, and the embedded model's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    small = AutoConfig.from_pretrained(EMBEDDED)
    kept = {name: getattr(small, name) for name in ("vocab_size", "eos_token_id", "tie_word_embeddings")}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES, **kept)).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(folder)
    return folder


def doctor(common: list[str], folder: Path) -> dict[str, Any]:
    return json.loads(finetune("doctor", "recipe=tiny_lora", *common, "--json", at=folder, may_fail=True))


def measured(method: str, common: list[str], device: str, folder: Path) -> dict[str, Any]:
    """One run: what was forecast, what was measured, and how it ran."""
    rows, length = ROWS[device]
    words = [f"recipe=tiny_{method}", *common, f"trainer.max_steps={STEPS}", f"data.max_length={length}"]
    words += ["data.packing=true", f"trainer.per_device_train_batch_size={rows}", "distributed=single"]
    words += [f"trainer.global_batch_size={rows}", "trainer.learning_rate=1e-5", f"run_name={method}"]
    report = json.loads(finetune("train", *words, f"output_dir={folder}", "--json", at=folder))
    kind = "allocated" if device == "cuda" else "resident"
    steps = [json.loads(step) for step in (folder / method / "metrics.jsonl").read_text().splitlines()]
    return {
        "method": method,
        "device": device,
        "strategy": report["strategy"]["actual"],
        "wrapped_by": report["wrapped_by"],
        "verified": all(check["passed"] for check in report["verified"]),
        "tokens_per_second": report["tokens_per_second"],
        "planned_bytes": report["memory"]["planned_bytes"][kind],
        "measured_bytes": max(own[kind] for own in report["memory"]["measured_bytes"]),
        "gpu_watts": [watts for step in steps for watts in step.get("gpu_watts", [])],
        "forecast": report["forecast"],
    }


def finetune(*words: str, at: Path, may_fail: bool = False) -> str:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "finetune", *words]
    done = subprocess.run(command, cwd=at, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0 and not may_fail:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout.strip().splitlines()[-1]


def line(run: dict[str, Any]) -> str:
    step, peak = run["forecast"]["step_seconds"], run["measured_bytes"]
    apart = [run["planned_bytes"][bound] / peak - 1 for bound in ("expected", "upper")]
    return (
        f"{run['method']:5} {run['tokens_per_second']:9,.0f} tokens/s  peak {peak / 1e9:.2f} GB "
        f"(forecast {apart[0]:+.1%}, upper {apart[1]:+.1%})  "
        f"step {step['measured']:.3f} s (forecast {step['planned']:.3f} s)"
    )


if __name__ == "__main__":
    sys.exit(main())
