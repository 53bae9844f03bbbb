"""Consumer cards without peer-to-peer copies are told so to NCCL, whatever the launcher."""

from __future__ import annotations

import pytest

from finetune.distributed.nccl import peer_to_peer_settings

OFF = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA GeForce RTX 4090", OFF),
        ("NVIDIA GeForce RTX 5090", OFF),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", OFF),
        ("NVIDIA GeForce RTX 3090", {}),
        ("NVIDIA A100-SXM4-80GB", {}),
        ("NVIDIA RTX 6000 Ada Generation", {}),
        ("NVIDIA H200", {}),
    ],
)
def test_cards(name: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in OFF:
        monkeypatch.delenv(variable, raising=False)
    assert peer_to_peer_settings([name, name]) == expected


def test_one_card_and_a_users_own_choice_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.delenv("NCCL_IB_DISABLE", raising=False)
    assert peer_to_peer_settings(["NVIDIA GeForce RTX 4090"]) == {}
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    assert peer_to_peer_settings(["NVIDIA GeForce RTX 4090"] * 2) == {"NCCL_IB_DISABLE": "1"}
