"""NCCL settings that a card needs and nobody else sets: peer-to-peer copies on consumer cards."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

NO_PEER_TO_PEER = re.compile(r"GeForce RTX (40|50)\d\d\b")
"""GeForce cards without peer-to-peer access between GPUs, on any driver: NCCL hangs or fails when it tries.

accelerate turns it off for the RTX 40 series on old drivers alone, and under torchrun raises an error
instead.
"""


def peer_to_peer_settings(gpu_names: Sequence[str]) -> dict[str, str]:
    """The environment variables for these cards; a value that the user has set is kept."""
    if len(gpu_names) < 2 or not any(NO_PEER_TO_PEER.search(name) for name in gpu_names):
        return {}
    wanted = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    return {name: value for name, value in wanted.items() if name not in os.environ}
