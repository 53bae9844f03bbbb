"""All that is known of this machine, gathered once: driver, cards, links, host, provider."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from finetune.hardware.host import Host, read_host
from finetune.hardware.links import Links, parse_links
from finetune.hardware.probe import Card, torch_cuda_version, visible_cards
from finetune.hardware.provider import Provider, find_provider, only_if_asked, outlives_stop
from finetune.hardware.smi import Slice, Smi, SmiCard, ask, read_smi


@dataclass(frozen=True, slots=True)
class MachineReport:
    """One machine, as its tools describe it."""

    smi: Smi
    in_sight: tuple[int, ...]
    """Numbers of the cards that CUDA_VISIBLE_DEVICES leaves; all, where it cannot be told which."""
    slices: tuple[tuple[int, Slice], ...]
    """Those that CUDA_VISIBLE_DEVICES names, each with the number of its card."""
    unmapped: tuple[str, ...]
    """Entries of CUDA_VISIBLE_DEVICES of which it is not known what cards they mean."""
    visible: str | None
    """CUDA_VISIBLE_DEVICES itself."""
    links: Links
    """Between the cards in sight."""
    host: Host
    provider: Provider | None
    """None: it bears no known mark."""
    folder_kept: bool | None
    """Whether the folder for runs outlives a stop of the machine; None: not known."""
    folder_asked: bool
    """It does only where its user has asked the provider for that."""
    torch: bool
    """Whether this Python has one."""
    torch_cuda: str | None
    """The CUDA that it was built for; None: a CPU build, or none."""

    @property
    def cards(self) -> tuple[SmiCard, ...]:
        """The cards in sight."""
        return tuple(self.smi.cards[number] for number in self.in_sight)

    @property
    def device_bytes(self) -> int:
        """Memory of what a run sees: of slices instead of their cards, where such are named."""
        divided = {number for number, _ in self.slices}
        whole = sum(card.total_bytes or 0 for card in self.cards if card.index not in divided)
        return whole + sum(one.memory_bytes or 0 for _, one in self.slices)


def probe_machine(folder: Path, *, measure_disk: bool = True) -> MachineReport:
    """Look at this machine in a second or two; `folder` is where runs would be written."""
    smi = read_smi()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    in_sight, slices, unmapped = _in_sight(smi.cards, visible)
    host, provider = read_host(folder, measure_disk=measure_disk), find_provider()
    resolved = Path(host.disk.folder).resolve()
    return MachineReport(
        smi=smi,
        in_sight=in_sight,
        slices=slices,
        unmapped=unmapped,
        visible=visible,
        links=_links().among(in_sight) if len(in_sight) > 1 else Links(),
        host=host,
        provider=provider,
        folder_kept=outlives_stop(provider, Path(host.disk.mount)) if provider else None,
        folder_asked=provider is not None and only_if_asked(provider, resolved),
        torch=find_spec("torch") is not None,
        torch_cuda=torch_cuda_version(),
    )


def _in_sight(
    cards: tuple[SmiCard, ...], visible: str | None
) -> tuple[tuple[int, ...], tuple[tuple[int, Slice], ...], tuple[str, ...]]:
    """Cards and slices that the variable leaves, as CUDA reads it, and its entries that cannot be mapped."""
    entries = [entry.strip() for entry in (visible or "").split(",") if entry.strip()]
    if any(entry.startswith("MIG-") for entry in entries):  # then CUDA takes slices alone
        named = {entry: _slice(cards, entry) for entry in entries}
        found = tuple(one for one in named.values() if one is not None)
        owners = dict.fromkeys(number for number, _ in found)
        return tuple(owners), found, tuple(entry for entry, one in named.items() if one is None)
    counted = tuple(entry for entry in entries if entry.isdigit())
    if counted and numbers_differ(cards):
        return tuple(card.index for card in cards), (), counted
    known = tuple(Card(card.name, card.uuid, 0) for card in cards)
    numbers = {card.uuid: card.index for card in cards}
    return tuple(dict.fromkeys(numbers[card.uuid] for card in visible_cards(known, visible))), (), ()


def numbers_differ(cards: tuple[SmiCard, ...]) -> bool:
    """Whether CUDA may count other cards first than nvidia-smi does: the fastest first, not by bus."""
    several = len({(card.name, card.total_bytes) for card in cards}) > 1
    return several and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"


def _slice(cards: tuple[SmiCard, ...], entry: str) -> tuple[int, Slice] | None:
    """The slice of a uuid, and its card; None: not told. Old drivers name the card in the slice's uuid."""
    for card in cards:
        for one in card.slices:
            if one.uuid and one.uuid.startswith(entry):
                return card.index, one
    uuid, _, _ = entry.removeprefix("MIG-").partition("/")
    owner = next((card for card in cards if uuid.startswith("GPU-") and card.uuid == uuid), None)
    return None if owner is None else (owner.index, Slice(0, entry, None))


def _links() -> Links:
    """Two more calls of nvidia-smi; one that fails tells nothing."""
    return parse_links(ask("topo", "-m").out, ask("topo", "-p2p", "r").out)
