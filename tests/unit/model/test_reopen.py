"""The checker of saved models notices what went wrong with other tools' saves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from finetune.model.export import Written, checksum
from finetune.model.reopen import LiveModel, check_tensors, equal_losses

START = {"a.lora_A.weight": torch.rand(2, 4), "a.lora_B.weight": torch.zeros(4, 2)}
TRAINED = {"a.lora_A.weight": START["a.lora_A.weight"] + 1, "a.lora_B.weight": torch.rand(4, 2)}


def failed(
    saved: dict[str, torch.Tensor], folder: Path, live: dict[str, torch.Tensor] | None = None
) -> set[str]:
    """Names of the checks that a file with these tensors does not pass."""
    save_file(saved, folder / "adapter_model.safetensors")
    written = Written()
    written.note(live or TRAINED)
    sums = {name: checksum(tensor) for name, tensor in START.items()}
    remembered = LiveModel(loss=1.0, batch={}, start_sums=sums, turn_end=0)
    return {
        check.name for check in check_tensors(folder, written, remembered, trained=True) if not check.passed
    }


def test_a_whole_adapter_passes(tmp_path: Path) -> None:
    assert failed(TRAINED, tmp_path) == set()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"a.lora_B.weight": torch.zeros(0)}, "no tensor is empty"),
        ({"a.lora_B.weight": torch.full((4, 2), float("nan"))}, "no tensor has NaN or infinity"),
        ({"a.lora_B.weight": TRAINED["a.lora_B.weight"].flip(0)}, "tensors equal the trained ones"),
    ],
)
def test_a_tensor_that_is_wrong_is_noticed(
    change: dict[str, torch.Tensor], complaint: str, tmp_path: Path
) -> None:
    assert complaint in failed({**TRAINED, **change}, tmp_path)


def test_a_missing_layer_is_noticed(tmp_path: Path) -> None:
    assert "all tensors are there" in failed({"a.lora_A.weight": TRAINED["a.lora_A.weight"]}, tmp_path)


def test_an_empty_folder_is_noticed(tmp_path: Path) -> None:
    live = LiveModel(loss=1.0, batch={}, start_sums={}, turn_end=0)
    checks = check_tensors(tmp_path, Written(), live, trained=True)
    assert not next(check for check in checks if check.name == "all tensors are there").passed


def test_an_adapter_that_did_not_move_is_noticed(tmp_path: Path) -> None:
    assert failed(START, tmp_path, live=START) == {"the adapter left its start"}


@pytest.mark.parametrize(
    ("live", "reopened", "same", "absolute"),
    [
        (1.0, 1.00005, True, False),
        (0.01, 0.0100023, True, True),
        (1.0, 1.01, False, True),
        (1.0, float("nan"), False, False),
    ],
)
def test_a_loss_is_the_same_by_a_rule_that_is_named(
    live: float, reopened: float, same: bool, absolute: bool
) -> None:
    found, told = equal_losses(live, reopened, 1e-4)
    assert (found, "in absolute numbers" in told) == (same, absolute)
