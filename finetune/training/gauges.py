"""What did the last steps cost each process: time, memory, its card's use and power?"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from finetune.distributed.world import gather_objects

log = logging.getLogger(__name__)


class OwnTime:
    """Seconds of a step in which a rank waits for no other: getting its rows, and in its forward passes.

    Under sharded weights a forward pass waits for the others' parts too, and ranks hardly differ. CUDA: by
    events, since the host runs ahead of the card.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device, *, compiled: bool) -> None:
        self.on_card = device.type == "cuda"
        self.seconds = 0.0
        self._begun: list[Any] = []
        """Of passes that go on: one may hold another."""
        self._passes: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        if not compiled:  # a clock would break the graph: rows alone are counted then
            model.register_forward_pre_hook(self._before)
            model.register_forward_hook(self._behind)

    def since_last(self) -> float:
        """Since this was asked before; the loss has been looked at, so every pass is over."""
        seconds = self.seconds + sum(begin.elapsed_time(end) for begin, end in self._passes) / 1000
        self.seconds = 0.0
        self._passes.clear()
        return seconds

    def _before(self, module: torch.nn.Module, inputs: Any) -> None:
        if module.training:
            self._begun.append(self._now())

    def _behind(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        if module.training and self._begun:
            begun = self._begun.pop()
            if self.on_card:
                self._passes.append((begun, self._now()))
            else:
                self.seconds += self._now() - begun

    def _now(self) -> Any:
        if not self.on_card:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


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
        return side_by_side(gather_objects(own | self._card()))

    def _card(self) -> dict[str, float | int]:
        """By NVML; a card or driver that does not tell is asked once."""
        if not self._card_is_read:
            return {}
        try:
            watts = torch.cuda.power_draw(self.device) / 1000
            return {"gpu_utilization": torch.cuda.utilization(self.device), "gpu_watts": watts}
        except Exception as error:  # noqa: BLE001  NVML's errors are classes of its own package
            log.info("gpu       its use and power are not told: %s", error)
            self._card_is_read = False
            return {}


def side_by_side(ranks: list[dict[str, float | int]]) -> dict[str, Any]:
    """Lists by rank of what every rank could read."""
    gauges: dict[str, Any] = {
        name: [rank[name] for rank in ranks] for name in ranks[0] if all(name in rank for rank in ranks)
    }
    seconds = gauges["rank_seconds"]
    return gauges | ({"slowest_rank": seconds.index(max(seconds))} if len(seconds) > 1 else {})


def flops_share(
    forecast: dict[str, Any] | None, tokens_per_second: float, document_tokens: float, processes: int
) -> float | None:
    """Model FLOPs utilisation (arXiv:2204.02311, appendix B): what the model needs for its tokens, of what
    its cards could do; layers that are run twice do not count. None: the card is not known.

    `document_tokens`: how long the document of a token is in the mean, which its attention sees half of.
    """
    needs = (forecast or {}).get("flops")
    if needs is None or needs["peak"] is None:
        return None
    seen = min(document_tokens, needs["window"] or document_tokens) / 2
    needed: float = tokens_per_second * (needs["token"] + needs["position"] * seen)
    return needed / (needs["peak"] * processes)
