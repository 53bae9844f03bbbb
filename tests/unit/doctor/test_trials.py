"""Which cards the kernels of a torch run on."""

from __future__ import annotations

import pytest

from finetune.doctor.trials import covered


@pytest.mark.parametrize(
    ("card", "built", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),  # an sm_80 kernel runs on every card of major version 8
        ((8, 0), ["sm_86"], False),
        ((12, 0), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_90", "compute_90"], True),  # PTX is compiled for newer cards
        ((10, 0), ["sm_90a", "sm_100"], True),
        ((7, 0), ["sm_75", "compute_75"], False),
    ],
)
def test_kernels_cover_a_card_by_major_version_or_by_ptx(
    card: tuple[int, int], built: list[str], runs: bool
) -> None:
    assert covered(card, built) is runs
