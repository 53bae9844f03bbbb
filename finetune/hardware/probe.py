"""What devices this machine has, found in milliseconds without importing torch.

NVIDIA GPUs are read from the driver's NVML library. AMD GPUs (ROCm) are not looked for.
"""

from __future__ import annotations

import ast
import ctypes
import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from finetune.config.devices import Devices
from finetune.hardware.cores import whole_cores

BF16_CAPABILITY = 8
"""Major compute capability from which a GPU computes in bfloat16 (Ampere)."""


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU as the driver shows it."""

    name: str
    uuid: str
    capability: int
    """Major compute capability."""
    memory_bytes: int = 0
    """All of its memory; 0: the driver does not say."""


@dataclass(frozen=True, slots=True)
class Driver:
    """What the NVIDIA driver says."""

    cards: tuple[Card, ...]
    cuda_major: int
    """Newest major CUDA version it can run."""


def probe_devices() -> Devices:
    """The devices of this machine, those hidden by CUDA_VISIBLE_DEVICES left out."""
    cards, unusable = _cards_in_sight()
    usable = () if unusable else cards
    return Devices(
        gpus=len(usable),
        gpu_names=tuple(card.name for card in usable),
        bf16=bool(usable) and all(card.capability >= BF16_CAPABILITY for card in usable),
        driver_gpus=len(cards),
        cpu_cores=whole_cores(),
        unusable=unusable,
    )


def usable_cards() -> tuple[Card, ...]:
    """The cards of this machine that the installed torch can use."""
    cards, unusable = _cards_in_sight()
    return () if unusable else cards


def _cards_in_sight() -> tuple[tuple[Card, ...], str]:
    """The cards that CUDA_VISIBLE_DEVICES leaves, and why torch cannot use them; empty when it can."""
    driver = read_driver()
    cards = visible_cards(driver.cards, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return cards, why_unusable(torch_cuda_version(), driver.cuda_major) if cards else ""


def visible_cards(cards: tuple[Card, ...], visible: str | None) -> tuple[Card, ...]:
    """The cards that CUDA would show: it stops at the first entry that names no card."""
    if visible is None:
        return cards
    found: list[Card] = []
    for entry in (e.strip() for e in visible.split(",")):
        by_uuid = [c for c in cards if entry.startswith("GPU-") and c.uuid.startswith(entry)]
        if entry.isdigit() and int(entry) < len(cards):
            found.append(cards[int(entry)])
        elif by_uuid:
            found.append(by_uuid[0])
        elif entry.startswith("MIG-") and cards:
            # a slice of a card: the driver tells the memory of the whole
            found.append(replace(cards[0], memory_bytes=0))
        else:
            break
    return tuple(found)


def why_unusable(torch_cuda: str | None, driver_cuda_major: int) -> str:
    """Why this torch cannot use the driver's cards; empty when it can."""
    if torch_cuda is None:
        return "the installed torch is built without CUDA"
    if driver_cuda_major == 0:
        return "the driver tells no CUDA version: its CUDA library (libcuda.so.1) is not here"
    if int(torch_cuda.split(".")[0]) > driver_cuda_major:
        return (
            f"the installed torch needs CUDA {torch_cuda}, and the driver runs up to CUDA {driver_cuda_major}"
        )
    return ""


def torch_cuda_version() -> str | None:
    """The CUDA version the installed torch was built for; None: a CPU build, or no torch."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(spec.submodule_search_locations[0]) / "version.py"
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign | ast.Assign) and isinstance(node.value, ast.Constant):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[-1]
            if isinstance(target, ast.Name) and target.id == "cuda":
                return str(node.value.value) if node.value.value else None
    return None


def read_driver() -> Driver:
    """The cards of the NVIDIA driver; none when there is no driver, or when it does not answer."""
    nvml = _load_nvml()
    if nvml is None or nvml.nvmlInit_v2() != 0:
        return Driver((), 0)
    try:
        version, count = ctypes.c_int(), ctypes.c_uint()
        nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version))
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        cards = [card for index in range(count.value) if (card := _card(nvml, index)) is not None]
        return Driver(tuple(cards), version.value // 1000)
    finally:
        nvml.nvmlShutdown()


def _load_nvml() -> ctypes.CDLL | None:
    for name in ("libnvidia-ml.so.1", "nvml.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _card(nvml: ctypes.CDLL, index: int) -> Card | None:
    handle = ctypes.c_void_p()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return None
    name, uuid = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvml.nvmlDeviceGetName(handle, name, 96)
    nvml.nvmlDeviceGetUUID(handle, uuid, 96)
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    memory = (ctypes.c_ulonglong * 3)()  # total, free, used
    total = memory[0] if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0 else 0
    return Card(name.value.decode(errors="replace"), uuid.value.decode(errors="replace"), major.value, total)
