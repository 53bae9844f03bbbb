"""All that is known of this machine, gathered once: driver, cards, links, host, provider."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from finetune.hardware.host import Host, read_host
from finetune.hardware.links import Links, parse_links
from finetune.hardware.probe import Card, torch_cuda_version, visible_cards
from finetune.hardware.provider import Provider, find_provider, outlives_stop
from finetune.hardware.smi import Smi, SmiCard, ask, read_smi


@dataclass(frozen=True, slots=True)
class MachineReport:
    """One machine, as its tools describe it."""

    smi: Smi
    in_sight: tuple[int, ...]
    """Numbers of the cards that CUDA_VISIBLE_DEVICES leaves."""
    visible: str | None
    """CUDA_VISIBLE_DEVICES itself."""
    links: Links
    """Between the cards in sight."""
    host: Host
    provider: Provider | None
    """None: it bears no known mark."""
    folder_kept: bool | None
    """Whether the folder for runs outlives a stop of the machine; None: not known."""
    torch: bool
    """Whether this Python has one."""
    torch_cuda: str | None
    """The CUDA that it was built for; None: a CPU build, or none."""

    @property
    def cards(self) -> tuple[SmiCard, ...]:
        """The cards in sight."""
        return tuple(self.smi.cards[number] for number in self.in_sight)


def probe_machine(folder: Path, *, measure_disk: bool = True) -> MachineReport:
    """Look at this machine in a second or two; `folder` is where runs would be written."""
    smi = read_smi()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    in_sight = _in_sight(smi.cards, visible)
    host, provider = read_host(folder, measure_disk=measure_disk), find_provider()
    return MachineReport(
        smi=smi,
        in_sight=in_sight,
        visible=visible,
        links=_links().among(in_sight) if len(in_sight) > 1 else Links(),
        host=host,
        provider=provider,
        folder_kept=outlives_stop(provider, Path(host.disk.folder)) if provider else None,
        torch=find_spec("torch") is not None,
        torch_cuda=torch_cuda_version(),
    )


def as_record(report: MachineReport) -> dict[str, Any]:
    """The report in JSON's own types."""
    return asdict(report)


def _in_sight(cards: tuple[SmiCard, ...], visible: str | None) -> tuple[int, ...]:
    """As CUDA reads the variable; slices of one card are that card."""
    known = tuple(Card(card.name, card.uuid, 0) for card in cards)
    numbers = {card.uuid: card.index for card in cards}
    return tuple(dict.fromkeys(numbers[card.uuid] for card in visible_cards(known, visible)))


def _links() -> Links:
    """Two more calls of nvidia-smi; one that fails tells nothing."""
    return parse_links(ask("topo", "-m").out, ask("topo", "-p2p", "r").out)
