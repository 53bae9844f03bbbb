"""Which optional packages a config needs, and whether they are installed (without importing them)."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from finetune.config.schema import Tracker

BITSANDBYTES_MINIMUM = (0, 46, 1)
"""What transformers 5 asks for."""

OPTIMIZER_PACKAGES = {
    "8bit": "bitsandbytes",
    "bnb": "bitsandbytes",
    "paged": "bitsandbytes",
    "ademamix": "bitsandbytes",
    "lion": "bitsandbytes",
    "galore": "galore-torch",
    "apollo": "apollo-torch",
    "lomo": "lomo-optim",
    "grokadamw": "grokadamw",
    "schedule_free": "schedulefree",
    "adamw_torch_4bit": "torchao",
    "adamw_torch_8bit": "torchao",
    "stable_adamw": "torch-optimi",
    "anyprecision": "torchdistx",
    "xla": "torch-xla",
    "npu": "torch-npu",
}
"""Part of an optimizer's name -> the package it comes from; the longest part decides."""

TRACKER_PACKAGES = {
    Tracker.tensorboard: ("tensorboard", "tensorboardX"),
    Tracker.wandb: ("wandb",),
    Tracker.mlflow: ("mlflow",),
    Tracker.trackio: ("trackio",),
}


def installed(package: str) -> tuple[int, ...] | None:
    """The version of an installed package as numbers; None when it is not installed."""
    try:
        text = version(package)
    except PackageNotFoundError:
        return None
    return version_numbers(text)


def version_numbers(text: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0)."""
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())


def optimizer_package(optim: str) -> str | None:
    """The package an optimizer comes from; None: torch itself."""
    parts = sorted((p for p in OPTIMIZER_PACKAGES if p in optim), key=len)
    return OPTIMIZER_PACKAGES[parts[-1]] if parts else None


def bitsandbytes_problem() -> str | None:
    """What is wrong with bitsandbytes here; None when it can be used."""
    found = installed("bitsandbytes")
    if found is None:
        return "needs bitsandbytes, which is not installed"
    if found < BITSANDBYTES_MINIMUM:
        needed, has = ".".join(map(str, BITSANDBYTES_MINIMUM)), ".".join(map(str, found))
        return f"needs bitsandbytes {needed} or newer, found {has}"
    return None
