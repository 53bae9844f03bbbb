"""What every test runs under: no network, caches of its own, and GPU tests that say why they are skipped."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.integration.browser import CHROMIUM, NO_CHROMIUM

FROM_LAUNCHERS = ("ACCELERATE_", "DEEPSPEED_", "FSDP_", "LOCAL_", "MASTER_", "TORCHELASTIC_")
SCRATCH = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment before any test module imports a library that reads it once."""
    scratch = Path(tempfile.mkdtemp(prefix="finetune-tests-"))
    config.stash[SCRATCH] = scratch
    for name in list(os.environ):
        if name.startswith(FROM_LAUNCHERS) or name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
    os.environ["FINETUNE_CACHE"] = str(scratch / "cache")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if not network_allowed():
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["HF_HOME"] = str(scratch / "huggingface")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[SCRATCH], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needed = {"gpu": 1, "multigpu": 2}
    for item in items:
        if item.get_closest_marker("network") and not network_allowed():
            item.add_marker(pytest.mark.skip(reason="reaches a hub: set FINETUNE_TEST_NETWORK=1"))
        if item.get_closest_marker("browser") and CHROMIUM is None:
            item.add_marker(pytest.mark.skip(reason=NO_CHROMIUM))
        cards = max((needed[mark.name] for mark in item.iter_markers() if mark.name in needed), default=0)
        if cards > usable_cards(cards):
            reason = f"needs {cards} CUDA device(s), torch can use {usable_cards(cards)} here"
            item.add_marker(pytest.mark.skip(reason=reason))


def network_allowed() -> bool:
    return os.environ.get("FINETUNE_TEST_NETWORK") == "1"


def usable_cards(needed: int) -> int:
    """Count CUDA devices; torch is imported only where a test needs one."""
    if needed == 0:
        return 0
    import torch

    return torch.cuda.device_count()
