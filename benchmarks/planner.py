"""The planner against published measurements: the error of each row, by source, method and strategy.

    python benchmarks/planner.py --rows FILE.csv [--json]

A row names a model, a method, a strategy, a card and the libraries that it was measured with; the columns are
read by name. Rows that are marked `exclude` and those that the planner cannot express are reported apart.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetune.config.schema import Strategy
from finetune.config.strategy import TRAITS, Traits
from finetune.hardware.machine import CONTEXT_BYTES, NCCL_BYTES, catalogue
from finetune.planner.from_config import QUANTISED_BYTES
from finetune.planner.job import Adapter, Job
from finetune.planner.memory import Memory, device_memory
from finetune.planner.optimizer import ADAM, OPTIMIZERS, Optimizer
from finetune.planner.placement import Placement
from finetune.planner.read_shape import read_shape
from finetune.planner.shape import Norms, Shape
from finetune.planner.stack import Recompute, Stack

MIB, UNITS = 2**20, {"GB": 1e9, "GiB": 2**30, "": 1e9}


def _shape(hidden: int, wide: int, layers: int, heads: int, keys: int, vocabulary: int, **more: Any) -> Shape:
    return Shape(
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        head_dim=more.pop("head_dim", hidden // heads),
        vocab_size=vocabulary,
        tie_word_embeddings=more.pop("tied", False),
        **more,
    )


def _old(*sizes: int, **more: Any) -> Shape:
    return _shape(*sizes, gated=False, norms=Norms.layer, **more)


LLAMA_3_8B = _shape(4096, 14336, 32, 32, 8, 128256)
LLAMA_3_70B = _shape(8192, 28672, 80, 64, 8, 128256)
MODELS: dict[str, Shape] = {
    "llama-2-7b": _shape(4096, 11008, 32, 32, 32, 32000),
    "llama-2-13b": _shape(5120, 13824, 40, 40, 40, 32000),
    "llama-2-70b": _shape(8192, 28672, 80, 64, 8, 32000),
    "llama-7b": _shape(4096, 11008, 32, 32, 32, 32000),
    "llama-13b": _shape(5120, 13824, 40, 40, 40, 32000),
    "llama-30b": _shape(6656, 17920, 60, 52, 52, 32000),
    "llama-65b": _shape(8192, 22016, 80, 64, 64, 32000),
    "codellama-34b": _shape(8192, 22016, 48, 64, 8, 32000),
    "llama-3-8b": LLAMA_3_8B,
    "llama-3.1-8b": LLAMA_3_8B,
    "llama-3-70b": LLAMA_3_70B,
    "llama-3.1-70b": LLAMA_3_70B,
    "llama-3.3-70b": LLAMA_3_70B,
    "llama-3.1-405b": _shape(16384, 53248, 126, 128, 8, 128256),
    "llama-3.2-1b": _shape(2048, 8192, 16, 32, 8, 128256, tied=True, head_dim=64),
    "llama-3.2-3b": _shape(3072, 8192, 28, 24, 8, 128256, tied=True),
    "mistral-7b": _shape(4096, 14336, 32, 32, 8, 32000),
    "mixtral-8x7b": _shape(4096, 14336, 32, 32, 8, 32000, num_experts=8, num_experts_per_tok=2),
    "mixtral-8x22b": _shape(6144, 16384, 56, 48, 8, 32000, num_experts=8, num_experts_per_tok=2),
    "yi-6b": _shape(4096, 11008, 32, 32, 4, 64000),
    "yi-34b": _shape(7168, 20480, 60, 56, 8, 64000),
    "qwen2.5-0.5b": _shape(896, 4864, 24, 14, 2, 151936, tied=True),
    "qwen2.5-1.5b": _shape(1536, 8960, 28, 12, 2, 151936, tied=True),
    "qwen2.5-3b": _shape(2048, 11008, 36, 16, 2, 151936, tied=True),
    "qwen2.5-7b": _shape(3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": _shape(5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": _shape(5120, 27648, 64, 40, 8, 152064),
    "qwen2.5-72b": _shape(8192, 29568, 80, 64, 8, 152064),
    "qwen2-7b": _shape(3584, 18944, 28, 28, 4, 152064),
    "gemma-2b": _shape(2048, 16384, 18, 8, 1, 256000, tied=True, head_dim=256),
    "gemma-7b": _shape(3072, 24576, 28, 16, 16, 256000, tied=True, head_dim=256),
    "gemma-2-9b": _shape(3584, 14336, 42, 16, 8, 256000, tied=True, head_dim=256, norms=Norms.sandwich),
    "gemma-2-27b": _shape(4608, 36864, 46, 32, 16, 256000, tied=True, head_dim=128, norms=Norms.sandwich),
    "phi-3-mini": _shape(3072, 8192, 32, 32, 32, 32064),
    "santacoder": _old(2048, 8192, 24, 16, 1, 49280, tied=True, num_parameters=1_124_886_528),
    "phi-1.5": _old(2048, 8192, 24, 32, 32, 51200),
    "phi-2": _old(2560, 10240, 32, 32, 32, 51200),
    "stablelm-alpha-3b": _old(4096, 16384, 16, 32, 32, 50688),
    "stablelm-alpha-7b": _old(6144, 24576, 16, 48, 48, 50432),
    "pythia-6.9b": _old(4096, 16384, 32, 32, 32, 50432),
    "pythia-12b": _old(5120, 20480, 36, 40, 40, 50688),
    "falcon-7b": _old(4544, 18176, 32, 71, 1, 65024, tied=True, head_dim=64),
    "tinyllama-1.1b": _shape(2048, 5632, 22, 32, 4, 32000),
}
"""Sizes of the models that are measured most, by their config.json."""

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
TARGETS = {
    "attn": ATTENTION,
    "qv": ("q_proj", "v_proj"),
    "qkv": ATTENTION[:3],
    "all": (*ATTENTION, *MLP),
    "all-o": (*ATTENTION[:3], *MLP),
    "mlp": MLP,
    "": (),
}
BASES = {
    "nf4": QUANTISED_BYTES[4, False],
    "nf4dq": QUANTISED_BYTES[4, True],
    "int8": QUANTISED_BYTES[8, False],
}
EFFECTIVE: dict[str, Optimizer] = {
    "adamw": ADAM,
    "adamw_fused": OPTIMIZERS["adamw_torch_fused"],
    "adam8": OPTIMIZERS["adamw_8bit"],
    "sgd": OPTIMIZERS["sgd"],
    "adafactor": OPTIMIZERS["adafactor"],
}
CARDS = {
    "24GB": 24564,
    "48GB": 46068,
    "80GB": 81920,
    "40GB": 40960,
    "16GB": 16376,
    "12GB": 12288,
    "8GB": 8192,
}
"""MiB of a card that is named by its size alone: the smallest total that such cards show."""


class Skipped(Exception):
    """A row that the planner cannot express, with the reason."""


@dataclass(frozen=True, slots=True)
class Result:
    """One row, forecast."""

    row: dict[str, str]
    memory: Memory | None = None
    outside: float = 0.0
    """Bytes of a process outside torch's count, for rows read off nvidia-smi."""
    fits: bool | None = None
    skipped: str | None = None
    forecast: dict[str, float] = field(default_factory=dict)
    compared: str = "reserved"
    error: float | None = None

    @property
    def kind(self) -> str:
        return self.row["kind"]


def forecast(row: dict[str, str]) -> Result:
    """The planner's answer to a row, in the row's own unit."""
    compared = "allocated" if row["measure"].startswith("alloc") else "reserved"
    try:
        place = placement(row)
        memory = device_memory(place)
    except Skipped as reason:
        return Result(row, skipped=str(reason), compared=compared)
    unit = UNITS[row["unit"]]
    outside = CONTEXT_BYTES + (NCCL_BYTES if place.processes > 1 else 0)
    extra = outside if row["measure"] == "smi" else 0
    sizes = {
        "allocated": memory.allocated.expected / unit,
        "reserved": (memory.reserved.expected + extra) / unit,
        "upper": (memory.reserved.upper + extra) / unit,
    }
    total = card_bytes(row["gpu"])
    fits = None if total is None else memory.needed + outside <= total
    try:
        error = sizes[compared] / float(row["peak_gb_per_gpu"]) - 1
    except ValueError:  # OOM, a range
        error = None
    return Result(row, memory, outside, fits, None, sizes, compared, error)


def card_bytes(name: str) -> float | None:
    """What a card has for processes; None where the row does not name it."""
    plain = name.rstrip("+").split("-")[0].lower() if name.endswith("+") else name.lower()
    size = CARDS.get(name.rstrip("+"))
    if size is not None:
        return size * MIB * 0.985
    key = plain.replace("-", "_")
    known = {"h100_96gb": "h100_nvl", "h100": "h100_80gb", "a100": "a100_80gb"}
    card = catalogue().get(known.get(key, key))
    if card is None or card.memory_mib is None:
        return None
    return (card.memory_mib - (card.reserved_mib or 0)) * MIB


def placement(row: dict[str, str]) -> Placement:
    """The job of a row, in the planner's terms."""
    for needed in ("tokens_per_micro_batch", "checkpointing", "loss_kernel"):
        if not row[needed]:
            raise Skipped(f"{needed} is not stated")
    full = row["method"] == "full"
    if row["method"] not in ("full", "lora", "qlora"):
        raise Skipped(f"method {row['method']!r}")
    shape, kernel = model_shape(row["model"]), row["loss_kernel"]
    found = re.search(r"\((\d+(?:\.\d+)?)V?\)", kernel)
    if found is None:
        raise Skipped(f"loss kernel {kernel!r}")
    traits, processes = _strategy(row)
    single = processes == 1 and row["strategy"] == "single"
    eager_2023 = "litgpt" in row["source"]  # one matrix for queries, keys and values; bitsandbytes 0.41
    fused = (
        kernel.startswith(("in place", "linear", "chunked", "16-bit logits, autocast in")) and not eager_2023
    )
    benchmark = "fms-acceleration" in row["source"]
    quantised = BASES.get(row["base_format"])
    upcast = row["kbit_fp32_upcast"] == "1"
    adapter_bytes = 4 if row["adapter_dtype"] == "fp32" else 2
    stack = Stack(
        logit_bytes=float(found[1]),
        fused_norm=fused,
        repeats_keys="istral" in row["model"]
        or "ixtral" in row["model"]
        or "method_comparison" in row["source"],
        fused_projections=eager_2023,
        fused_mlp=row["checkpointing"] == "offload",
        float32_residual=upcast and single,
        float32_rest=upcast and "SFTTrainer" not in row["notes"],
        autocast="method_comparison" not in row["source"],
        copies_attention=False,
        keeps_quantised_inputs=eager_2023,
        experts_in_turn=True,
        recomputed_output=not eager_2023,
        extra_kept=5.0 if eager_2023 else 0.0,
        fsdp=1 if row["fsdp_version"] == "1" else 2,
    )
    rank = int(row["lora_rank"] or 0) or 64
    dropout = benchmark or eager_2023
    job = Job(
        shape=shape,
        adapter=None
        if full
        else Adapter(r=rank, targets=_targets(row), dropout=dropout, dora="DoRA" in row["notes"]),
        trained_bytes=(4 if row["master_dtype"] == "fp32" else 2) if full else adapter_bytes,
        quantised_bytes=quantised,
        optimizer=EFFECTIVE.get(row["optimizer_effective"], ADAM),
        tokens=int(float(row["tokens_per_micro_batch"])),
        row_tokens=_number(row["seq_len"]) or int(float(row["tokens_per_micro_batch"])),
        recompute=Recompute(row["checkpointing"]),
        stack=stack,
    )
    return Placement(job, traits, processes)


def model_shape(name: str) -> Shape:
    """By name: the table above, else conf/model."""
    plain = name.lower().replace("meta-", "").replace("_", "-")
    named = [key for key in MODELS if key in plain]
    if named:
        return MODELS[max(named, key=len)]
    from finetune.config.compose import compose
    from finetune.config.recipes import config_groups

    for model in config_groups()["model"]:
        config = compose([f"model={model}"], problems=[]).config.model
        if plain in config.name_or_path.lower():
            return read_shape(config)
    raise Skipped(f"the sizes of {name} are not known")


def _strategy(row: dict[str, str]) -> tuple[Traits, int]:
    strategy, processes = row["strategy"], int(row["n_gpus"])
    if row["fsdp_version"] == "NO_SHARD" or strategy == "single":
        return TRAITS[Strategy.single], 1
    named = strategy.replace("+", "_")
    if named not in Strategy.__members__:
        raise Skipped(f"strategy {strategy!r}")
    return TRAITS[Strategy(named)], processes


def _targets(row: dict[str, str]) -> frozenset[str]:
    if row["lora_targets"] not in TARGETS:
        raise Skipped(f"lora_targets {row['lora_targets']!r}")
    return frozenset(TARGETS[row["lora_targets"]])


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def measured(results: Iterable[Result]) -> list[Result]:
    return [r for r in results if r.kind == "measured" and not r.row["exclude"] and r.error is not None]


def summary(results: list[Result]) -> dict[str, Any]:
    """Errors of the measured rows, and what is said of the others."""
    counted = [r for r in results if not r.row["exclude"]]
    rows = measured(results)
    skipped = [r for r in counted if r.kind == "measured" and r.skipped]
    reserved = [r for r in rows if r.compared == "reserved"]
    bounds = [r.forecast["upper"] / float(r.row["peak_gb_per_gpu"]) for r in reserved]
    limits = [r for r in counted if r.kind == "LIMIT" and r.error is not None]
    groups = defaultdict(list)
    for result in rows:
        row = result.row
        groups[f"{_source(row)} | {row['method']} | {row['strategy']} | {result.compared}"].append(result)
    return {
        "measured": len(rows) + len(skipped),
        "skipped": len(skipped),
        "excluded": sum(bool(r.row["exclude"]) for r in results),
        "allocated": errors(r for r in rows if r.compared == "allocated"),
        "reserved": errors(reserved),
        "upper_covers": _share(b >= 1 for b in bounds),
        "upper_ratio_median": statistics.median(bounds) if bounds else None,
        "oom_called_fits": [_name(r) for r in counted if r.kind == "OOM" and r.fits],
        "measured_called_no_fit": _share(r.fits is False for r in counted if r.kind == "measured"),
        "limit": errors(limits),
        "leave_source_out": leave_source_out(rows),
        "groups": {name: errors(group) for name, group in sorted(groups.items())},
    }


def leave_source_out(rows: list[Result]) -> dict[str, Any]:
    """Each source judged without what was learnt from it: litgpt's unexplained bytes are the one constant of
    an allocated peak that was read off a source, and the shares of the reserved one are fitted anew to the
    other sources.
    """
    found: dict[str, list[float]] = {"allocated": [], "reserved": []}
    for source in sorted({_source(r.row) for r in rows}):
        others = [r for r in rows if _source(r.row) != source and r.compared == "reserved"]
        share = _fitted_share(others)
        for result in (r for r in rows if _source(r.row) == source):
            again = _without_source(result)
            value = again.allocated.expected
            if result.compared == "reserved":
                value += share * (again.reserved.expected - again.allocated.expected)
                value += result.outside if result.row["measure"] == "smi" else 0
            value /= UNITS[result.row["unit"]]
            found[result.compared].append(abs(value / float(result.row["peak_gb_per_gpu"]) - 1))
    return {name: _errors(values) for name, values in found.items()}


def _without_source(result: Result) -> Memory:
    place = placement(result.row)
    if place.job.stack.extra_kept:
        stack = replace(place.job.stack, extra_kept=0.0)
        place = replace(place, job=replace(place.job, stack=stack))
    return device_memory(place)


def _fitted_share(rows: list[Result]) -> float:
    """How much of the planner's reserve the other sources show, by the median."""
    shares = []
    for result in rows:
        assert result.memory is not None
        seen = float(result.row["peak_gb_per_gpu"]) * UNITS[result.row["unit"]]
        seen -= result.outside if result.row["measure"] == "smi" else 0
        reserve = result.memory.reserved.expected - result.memory.allocated.expected
        shares.append((seen - result.memory.allocated.expected) / reserve)
    return statistics.median(shares) if shares else 1.0


def errors(results: Iterable[Result]) -> dict[str, Any]:
    return _errors([abs(r.error) for r in results if r.error is not None])


def _errors(values: list[float]) -> dict[str, Any]:
    values = sorted(values)
    if not values:
        return {"rows": 0}
    worst = values[min(int(0.9 * len(values)), len(values) - 1)]
    return {"rows": len(values), "median": statistics.median(values), "nine_in_ten": worst, "max": values[-1]}


def _share(flags: Iterable[bool]) -> float | None:
    found = list(flags)
    return sum(found) / len(found) if found else None


def _source(row: dict[str, str]) -> str:
    return row["source"].partition(" ")[0].rpartition("/")[2] or row["source"]


def _name(result: Result) -> str:
    row = result.row
    return " ".join(
        (row["model"], row["method"], row["strategy"], f"{row['n_gpus']}x", row["gpu"], row["seq_len"])
    )


def as_json(result: Result) -> dict[str, Any]:
    return {
        **result.row,
        "forecast_gb": result.forecast or None,
        "compared": result.compared,
        "error": result.error,
        "fits": result.fits,
        "skipped": result.skipped,
    }


def print_summary(found: dict[str, Any], results: list[Result]) -> None:
    for name, group in found["groups"].items():
        print(f"{name:<78} {_line(group)}")
    print(f"\nmeasured rows {found['measured']}, skipped {found['skipped']}, excluded {found['excluded']}")
    for result in results:
        if result.skipped and result.kind == "measured" and not result.row["exclude"]:
            print(f"  skipped: {_name(result)}: {result.skipped}")
    for name in ("allocated", "reserved", "limit"):
        print(f"{name:<28} {_line(found[name])}")
    for name, group in found["leave_source_out"].items():
        print(f"{'without the source: ' + name:<28} {_line(group)}")
    print(
        f"upper bound covers {found['upper_covers']:.0%} of the reserved rows at a median of "
        f"{found['upper_ratio_median']:.2f} times the measured value"
    )
    print(f"measured rows called 'does not fit': {found['measured_called_no_fit']:.1%}")
    print(f"OOM rows called 'fits': {len(found['oom_called_fits'])} {found['oom_called_fits'] or ''}")


def _line(group: dict[str, Any]) -> str:
    if not group["rows"]:
        return "no rows"
    return (
        f"{group['rows']:>4} rows  median {group['median']:5.1%}  nine in ten {group['nine_in_ten']:5.1%}  "
        f"max {group['max']:5.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with given.rows.open(encoding="utf-8", newline="") as stream:
        results = [forecast(row) for row in csv.DictReader(stream)]
    found = summary(results)
    if given.json:
        print(json.dumps({"rows": [as_json(r) for r in results], "summary": found}))
    else:
        print_summary(found, results)


if __name__ == "__main__":
    main()
