"""In which precision a run computes and holds its weights: set once, the same under every strategy."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.config.case import Lack
from finetune.config.devices import Devices
from finetune.config.schema import Method, RunConfig
from finetune.errors import Problem

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
PRECISIONS = {dtype: precision for precision, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Precision:
    """What is computed in what."""

    compute: str
    """`fp32`, `bf16` or `fp16`."""
    reason: str
    trained_dtype: str
    """torch's name of the dtype in which trained weights are held."""
    frozen_dtype: str
    """The same for frozen weights; quantised ones are stored apart."""
    notes: tuple[str, ...] = ()


def resolve_precision(config: RunConfig, devices: Devices, device: str, problems: list[Problem]) -> Precision:
    """The precision asked for, or the one that the device is good at."""
    asked = config.model.dtype
    full = config.adapter.method is Method.full
    if asked is not None and asked not in PRECISIONS:
        problems.append(Problem(f"model.dtype={asked}", "expected float32, bfloat16 or float16, or null"))
        asked = None
    compute, reason = _compute(config, devices, device, asked, problems)
    if full and asked == "float16":
        problems.append(
            Problem(
                "model.dtype=float16",
                "trained weights in float16 cannot be trained: their gradients cannot be unscaled",
                "Leave model.dtype out (trainer.fp16=true computes in fp16 all the same), or use bfloat16.",
            )
        )
    trained = asked if full and asked else "float32"
    notes: tuple[str, ...] = ()
    if trained != "float32":
        notes = (
            f"model.dtype={trained}: the trained weights are held in {trained}, without a float32 copy; "
            "small updates are lost in rounding",
        )
    return Precision(compute, reason, trained, asked or DTYPES[compute], notes)


def _compute(
    config: RunConfig, devices: Devices, device: str, asked: str | None, problems: list[Problem]
) -> tuple[str, str]:
    bf16, fp16 = config.trainer.bf16, config.trainer.fp16
    if bf16 and fp16:
        why = "only one of them can be"
        problems.append(Problem("trainer.bf16=true and trainer.fp16=true", why, "Set one."))
    set_by, wanted = "", None
    if fp16 or bf16:
        set_by, wanted = ("trainer.fp16=true", "fp16") if fp16 else ("trainer.bf16=true", "bf16")
    elif asked in ("bfloat16", "float16"):
        set_by, wanted = f"model.dtype={asked}", PRECISIONS[asked]
        if (bf16 if wanted == "bf16" else fp16) is False:
            why = f"weights in {asked} are computed in {wanted}"
            problems.append(Problem(f"{set_by} and trainer.{wanted}=false", why, "Leave one of them out."))
    if wanted == "fp16" and device == "cpu":
        why = "a CPU does not train in fp16; it can in fp32 and bf16"
        problems.append(Problem(set_by, why, "Use trainer.bf16=true, or leave both out (fp32)."))
    if wanted == "bf16" and device == "cuda" and not devices.bf16:
        why = f"{_names(devices)} does not compute in bf16; it does in fp32 and fp16"
        problems.append(Lack(set_by, why, "Use trainer.fp16=true, or leave both out (fp32)."))
    if wanted is not None:
        return wanted, set_by
    if bf16 is False:
        return "fp32", "trainer.bf16=false"
    if device == "cpu":
        return "fp32", "on CPU; trainer.bf16=true is possible"
    if devices.bf16:
        return "bf16", f"{_names(devices)} computes in bf16"
    return "fp32", f"{_names(devices)} has no bf16; trainer.fp16=true is faster"


def _names(devices: Devices) -> str:
    return " and ".join(sorted(set(devices.gpu_names))) or "the GPU"
