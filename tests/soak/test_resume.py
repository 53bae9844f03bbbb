"""The full matrix of going on: every method, strategy and kind of data, against the straight run."""

from __future__ import annotations

import shutil

import pytest

from tests.distributed.test_parity import METHODS
from tests.distributed.test_resume import KINDS, STRATEGIES, assert_the_same_run, resumed, words
from tests.front_door import in_world

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_kind_of_data_is_gone_on_with(
    strategy: str, method: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    at, processes = tmp_path_factory.mktemp("resume"), 1 if strategy == "single" else 2
    cases = {kind: words(method, strategy, kind) for kind in KINDS}
    straight = in_world(cases, processes, at)
    again = resumed(straight, cases, processes, at)
    for kind in KINDS:
        assert_the_same_run(again[kind], straight[kind], strategy)
    shutil.rmtree(at)
