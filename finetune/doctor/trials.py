"""Does the software that a run needs work on its device? Each piece does a little of the run's own work.

What it needs is imported where it is tried: whoever hangs at an import has said so before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from finetune.config.rules import RunFacts
from finetune.config.schema import Method, RunConfig
from finetune.config.strategy import TRAITS, Engine

LARGEST_ERROR = {"fp32": 5e-3, "bf16": 2e-2, "fp16": 5e-3}
"""Relative, of a matrix product: inputs rounded to the precision (TF32: fp32) give less than half of it."""
FIX = {
    "CUDA kernels": "Install a torch whose kernels cover this card: https://pytorch.org/get-started/locally",
    **dict.fromkeys(
        LARGEST_ERROR, "If `python -c 'import torch; torch.ones(1).cuda()'` fails too: change the machine."
    ),
    "bitsandbytes": "See `python -m bitsandbytes`; pip install --force-reinstall bitsandbytes.",
    "DeepSpeed": "See `ds_report`; a strategy of FSDP (distributed=fsdp) does without it.",
}
Found = tuple[bool, str]
"""Whether something works, and what was seen."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A piece of software tried on the device."""

    name: str
    works: bool
    detail: str
    fix: str = ""


def try_software(config: RunConfig, facts: RunFacts, enter: Callable[[str], None]) -> tuple[Trial, ...]:
    """Try all that this run needs of its device; `enter` is told of each piece before it begins."""
    trials = []
    for name, work in _wanted(config, facts).items():
        enter(f"matrix product in {name}" if name in LARGEST_ERROR else name)
        trials.append(_tried(name, work))
    return tuple(trials)


def covered(card: tuple[int, int], built: list[str]) -> bool:
    """Whether kernels run on a card: those of its major version up to its minor one, or any older PTX."""
    for entry in built:
        kind, _, number = entry.partition("_")
        if not number.isdigit():  # sm_90a: for that one card alone, which has an sm_90 too
            continue
        major, minor = int(number[:-1]), int(number[-1])
        if (major == card[0] and minor <= card[1]) if kind == "sm" else (major, minor) <= card:
            return True
    return False


def _wanted(config: RunConfig, facts: RunFacts) -> dict[str, Callable[[], Found]]:
    wanted: dict[str, Callable[[], Found]] = {"CUDA kernels": _kernels} if facts.device == "cuda" else {}
    for precision in ("fp32", facts.precision):
        wanted[precision] = partial(_product, facts.device, precision)
    if config.adapter.method is Method.qlora:
        wanted["bitsandbytes"] = partial(_quantisation, facts.device, config)
    if TRAITS[facts.strategy].engine is Engine.deepspeed:
        wanted["DeepSpeed"] = _deepspeed
    return wanted


def _tried(name: str, work: Callable[[], Found]) -> Trial:
    try:
        works, detail = work()
    except Exception as error:  # noqa: BLE001 - whatever a library raises is what was to be found out
        told = "; ".join(str(error).strip().splitlines()[:3])
        works, detail = False, f"{type(error).__name__}: {told}"
    return Trial(name, works, detail, "" if works else FIX[name])


def _kernels() -> Found:
    """The card against those that this torch was compiled for."""
    import torch

    card, built = torch.cuda.get_device_capability(), torch.cuda.get_arch_list()
    kernels = f"torch {torch.__version__} has kernels for {' '.join(built)}"
    return covered(card, built), f"{kernels}, and the card is sm_{card[0]}{card[1]}"


def _product(device: str, precision: str) -> Found:
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    product = (left.to(device, dtype) @ right.to(device, dtype)).cpu().double()
    error = float((product - exact).norm() / exact.norm())
    return error < LARGEST_ERROR[precision], f"matrix product off by {error:.1e}"  # NaN is not less


def _quantisation(device: str, config: RunConfig) -> Found:
    """A tensor quantised as the run's weights are, and back."""
    import bitsandbytes
    import torch
    from bitsandbytes import functional

    weights = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).to(device)
    kind, bound = ("int8", 0.02) if config.adapter.bits == 8 else (config.adapter.quant_type, 0.2)
    if config.adapter.bits == 8:
        numbers, scales, _ = functional.int8_vectorwise_quant(weights.half())
        back = functional.int8_vectorwise_dequant(numbers, scales)
    else:
        back = functional.dequantize_4bit(*functional.quantize_4bit(weights, quant_type=kind))
    error = float((back.float() - weights).norm() / weights.norm())
    return error < bound, f"{bitsandbytes.__version__}: {kind} and back is off by {error:.1%}"


def _deepspeed() -> Found:
    """DeepSpeed itself, and the one operation that it compiles for our runs: none on a GPU."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from torch.utils import cpp_extension

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None or not builder.is_compatible():
        return True, f"{deepspeed.__version__}: nothing has to be compiled here"
    folder = Path(cpp_extension._get_build_directory(builder.name, False))
    lock = folder / "lock"
    if lock.exists():
        return False, f"a run waits for {lock}: something compiles, or was ended at it (then: rm {lock})"
    if not cpp_extension.is_ninja_available():
        return (
            False,
            f"{builder.name} is compiled and loaded with ninja, which is not here: pip install ninja",
        )
    compiled = (folder / f"{builder.name}.so").exists()
    when = "is compiled" if compiled else "is compiled when the first run starts, in a minute or two"
    return True, f"{deepspeed.__version__}: {builder.name} {when}"
