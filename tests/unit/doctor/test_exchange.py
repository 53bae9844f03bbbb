"""Whether a port is looked at before processes are to meet at it."""

from __future__ import annotations

from finetune.config.schema import LaunchConfig
from finetune.doctor.exchange import port_check


def test_a_port_is_looked_at_only_where_it_is_known_and_opened_here() -> None:
    assert port_check(LaunchConfig()) is None
    assert port_check(LaunchConfig(num_machines=2, machine_rank=1, main_process_port=29500)) is None
