"""Rehearsals, all of them: every architecture with every method and strategy, and every fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.rehearse.every import architectures
from tests.integration.test_rehearse import FAULTS, assert_noticed, rehearsed

MODELS = sorted(architectures())


@pytest.mark.soak
@pytest.mark.parametrize("model", MODELS)
def test_an_architecture_with_every_method_under_every_strategy(model: str, tmp_path: Path) -> None:
    code, stages = rehearsed("--all", f"model={model}", at=tmp_path)
    assert code == 0, [stage for stage in stages.values() if stage["status"] != "pass"]
    assert [stage["status"] for stage in stages.values()] == ["pass"] * 3 * 9  # nothing is skipped


@pytest.mark.soak
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_fails_its_stage(fault: str, tmp_path: Path) -> None:
    assert_noticed(fault, tmp_path)
