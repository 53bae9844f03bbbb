"""Devices are counted from the driver, the environment and torch's own version file."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from finetune.hardware import probe
from finetune.hardware.probe import Card, Driver, probe_devices, visible_cards, why_unusable
from finetune.paths import PACKAGE

A100 = Card("NVIDIA A100", "GPU-aaaa-1", 8)
H100 = Card("NVIDIA H100", "GPU-bbbb-2", 9)
V100 = Card("Tesla V100", "GPU-cccc-3", 7)
CARDS = (A100, H100, V100)


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, CARDS),
        ("", ()),
        ("-1", ()),
        ("1", (H100,)),
        ("2,0", (V100, A100)),
        ("0,9,1", (A100,)),
        ("GPU-bbbb", (H100,)),
        ("MIG-1234", (A100,)),
        ("NoDevFiles", ()),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(visible: str | None, seen: tuple[Card, ...]) -> None:
    assert visible_cards(CARDS, visible) == seen


def test_a_torch_that_cannot_drive_the_cards_says_why() -> None:
    assert why_unusable("12.8", 13) == ""
    assert why_unusable("12.8", 12) == ""
    assert why_unusable(None, 12) == "the installed torch is built without CUDA"
    assert "needs CUDA 13.0, and the driver runs up to CUDA 12" in why_unusable("13.0", 12)


@pytest.mark.parametrize(
    ("cards", "torch_cuda", "gpus", "bf16"),
    [
        ((A100, H100), "12.8", 2, True),
        ((A100, V100), "12.8", 2, False),
        ((A100,), None, 0, False),
        ((), None, 0, False),
    ],
)
def test_devices_carry_what_torch_can_use_and_what_the_driver_shows(
    monkeypatch: pytest.MonkeyPatch, cards: tuple[Card, ...], torch_cuda: str | None, gpus: int, bf16: bool
) -> None:
    monkeypatch.setattr(probe, "read_driver", lambda: Driver(cards, 12))
    monkeypatch.setattr(probe, "torch_cuda_version", lambda: torch_cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices = probe_devices()
    assert (devices.gpus, devices.driver_gpus, devices.bf16) == (gpus, len(cards), bf16)
    assert bool(devices.unusable) == (bool(cards) and not gpus)
    assert devices.cpu_cores >= 1


def test_a_machine_without_a_driver_has_no_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_load_nvml", lambda: None)
    assert probe.read_driver() == Driver((), 0)


def test_torch_is_not_imported_to_count_devices() -> None:
    use = "from finetune.hardware.probe import probe_devices; probe_devices();"
    code = f"import sys; {use} print('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.gpu
def test_the_count_is_torchs_own() -> None:
    import torch

    devices = probe_devices()
    assert devices.gpus == torch.cuda.device_count()
    assert devices.bf16 == torch.cuda.is_bf16_supported()
