"""Preparing chat rows with `finetune prepare` against plain trl: tokenised, masked on the answers, packed.

    python benchmarks/data.py --rows FILE.jsonl [--model DIR] [--rounds 3] [--length 512] [--json]

FILE holds `messages`; DIR is a folder with a tokenizer whose chat template has generation markers (trl masks
answers by them; without DIR one is trained on the benchmark's own rows). Both are whole processes on the same
cores, in turn (A B A B ...), each with empty caches: ours is `python -m finetune prepare`, trl's builds an
SFTTrainer (`packing=True, assistant_only_loss=True`) around a model of a few thousand weights, and stops.
Beside the whole processes, the preparation alone is timed inside each: without trl's imports, with ours.
Then ours runs again, from its cache. `tokenizers` alone, over the rendered rows, is the floor. Only ratios of
a pair mean anything.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from workload import environment, make_tokenizer

OURS = """
import json, sys, time
from finetune.commands import prepare as command
from finetune.data import prepare
from finetune.words import split_words
work = prepare.prepare_data
def timed(*args):
    started = time.perf_counter()
    result = work(*args)
    json.dump(time.perf_counter() - started, open(sys.argv[1], "w"))
    return result
prepare.prepare_data = timed
sys.exit(command.main(split_words(sys.argv[2:])))
"""

THEIRS = """
import json, sys, time
from datasets import load_dataset
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from trl import SFTConfig, SFTTrainer
out, rows, folder, length, work = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = Qwen3ForCausalLM(Qwen3Config(
    vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    num_attention_heads=1, num_key_value_heads=1, head_dim=8,
))
started = time.perf_counter()
data = load_dataset("json", data_files=rows, split="train")
arguments = SFTConfig(
    output_dir=work, max_length=int(length), packing=True, assistant_only_loss=True, use_cpu=True, bf16=False,
    report_to="none",
)
trainer = SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
json.dump(time.perf_counter() - started, open(out, "w"))
"""

FLOOR = """
import json, sys, time
from transformers import PreTrainedTokenizerFast
out, rows, folder = sys.argv[1:]
tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
texts = tokenizer.apply_chat_template([json.loads(line)["messages"] for line in open(rows)], tokenize=False)
started = time.perf_counter()
tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
json.dump(time.perf_counter() - started, open(out, "w"))
"""


def run(script: str, arguments: list[str], work: Path, *, keep_cache: bool = False) -> dict[str, float]:
    """One whole process: its seconds from start to end, and those of the preparation inside it."""
    out = work / "seconds.json"
    out.unlink(missing_ok=True)
    if not keep_cache:
        shutil.rmtree(work / "cache", ignore_errors=True)
    started = time.perf_counter()
    command = [sys.executable, "-c", script, str(out), *arguments]
    done = subprocess.run(
        command, env=environment(work), capture_output=True, text=True, check=False, cwd=work
    )
    whole = time.perf_counter() - started
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return {"whole_seconds": whole, "preparation_seconds": json.loads(out.read_text(encoding="utf-8"))}


def compare(rows: Path, model: Path, work: Path, rounds: int, length: int) -> dict[str, Any]:
    """Pairs of runs in turn; a ratio is our time over trl's in the same pair."""
    ours = [
        *("prepare", f"model.name_or_path={model}", f"data.train=[{{path: {rows}}}]"),
        *(f"data.max_length={length}", "data.too_long=truncate", "data.packing=true", "model.cpu=true"),
    ]
    pairs = []
    for number in range(rounds):
        theirs = run(THEIRS, [str(rows), str(model), str(length), str(work / "trl")], work)
        pair = {"trl": theirs, "ours": run(OURS, ours, work)}
        pair["cached"] = run(OURS, ours, work, keep_cache=True)
        pairs.append(pair)
        ratio = pair["ours"]["preparation_seconds"] / theirs["preparation_seconds"]
        print(f"pair {number + 1}: {ratio:.2f} of trl's time", file=sys.stderr)
    floor = run(FLOOR, [str(rows), str(model)], work)["preparation_seconds"]

    def ratio(kind: str) -> float:
        return statistics.median(pair["ours"][kind] / pair["trl"][kind] for pair in pairs)

    return {
        "pairs": pairs,
        "preparation_ratio": ratio("preparation_seconds"),
        "whole_ratio": ratio("whole_seconds"),
        "cached_whole_seconds": statistics.median(pair["cached"]["whole_seconds"] for pair in pairs),
        "tokenizers_alone_seconds": floor,
    }


def main() -> None:
    """Print the ratios, or one JSON object."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        model = arguments.model.absolute() if arguments.model else make_tokenizer(work / "model")
        result = compare(arguments.rows.absolute(), model, work, arguments.rounds, arguments.length)
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"preparation   {result['preparation_ratio']:.2f} of trl's time (trl's imports not counted)")
    print(f"whole process {result['whole_ratio']:.2f} of trl's time")
    print(f"from cache    {result['cached_whole_seconds']:.1f} s, the whole process")
    print(f"floor         {result['tokenizers_alone_seconds']:.1f} s for tokenizers alone, all rows at once")


if __name__ == "__main__":
    main()
