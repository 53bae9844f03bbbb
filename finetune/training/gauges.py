"""What did the last steps cost each process: time of its own, memory, its card's use and power?"""

from __future__ import annotations

import logging
from typing import Any

import torch

from finetune.distributed.world import gather_objects

log = logging.getLogger(__name__)


class Gauges:
    """Reads this process's gauges, and puts those of all ranks side by side."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._card_is_read = device.type == "cuda"

    def read(self, rank_seconds: float, memory: dict[str, int]) -> dict[str, Any]:
        """Lists by rank: `rank_seconds`, `memory_KIND_bytes` (peaks), and of cards `gpu_utilization` (%) and
        `gpu_watts`; with several ranks `slowest_rank`, the one with the most seconds. Every rank calls it.
        """
        own: dict[str, float | int] = {"rank_seconds": rank_seconds}
        own |= {f"memory_{kind}_bytes": size for kind, size in memory.items()}
        own |= self._card()
        ranks = gather_objects(own)
        gauges: dict[str, Any] = {name: [rank.get(name) for rank in ranks] for name in own}
        seconds = gauges["rank_seconds"]
        return gauges | ({"slowest_rank": seconds.index(max(seconds))} if len(seconds) > 1 else {})

    def _card(self) -> dict[str, float | int]:
        """By NVML; a card or driver that does not tell is asked once."""
        if not self._card_is_read:
            return {}
        try:
            watts = torch.cuda.power_draw(self.device) / 1000
            return {"gpu_utilization": torch.cuda.utilization(self.device), "gpu_watts": watts}
        except Exception as error:  # noqa: BLE001  NVML's errors are classes of a package that may be missing
            log.info("gpu       its use and power are not told: %s", error)
            self._card_is_read = False
            return {}


def flops_share(forecast: dict[str, Any] | None, tokens_per_second: float, processes: int) -> float | None:
    """Model FLOPs utilisation (arXiv:2204.02311, appendix B): what the model needs for its tokens, of what
    its cards could do; layers that are run twice do not count. None: the card is not known.
    """
    if forecast is None or not forecast.get("peak_flops"):
        return None
    share: float = tokens_per_second * forecast["flops_per_token"] / (forecast["peak_flops"] * processes)
    return share
