"""How are the cards of this machine joined, and may they copy to each other directly?

Reads `nvidia-smi topo -m` and `nvidia-smi topo -p2p r`. Needs the standard library alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from finetune.distributed.nccl import NO_PEER_TO_PEER

MEANING = {
    "NV": "NVLink",
    "PIX": "one PCIe bridge",
    "PXB": "several PCIe bridges",
    "PHB": "a PCIe host bridge, that is the CPU",
    "NODE": "several PCIe host bridges of one CPU",
    "SYS": "the link between two CPUs",
}
"""How nvidia-smi calls the way from one card to another, the fastest first."""
FAST = ("NV", "PIX", "PXB")
"""Ways that leave the CPU out."""
REFUSED = {
    "NS": "not supported",
    "CNS": "not supported by the chipset",
    "GNS": "not supported by the cards",
    "TNS": "not supported by the way they are joined",
    "DR": "switched off by the driver",
}
"""How nvidia-smi says that cards cannot read each other's memory."""
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Links:
    """A matrix over the cards; empty: nvidia-smi did not tell it."""

    cards: tuple[int, ...] = ()
    """Their numbers, as nvidia-smi counts them."""
    ways: tuple[tuple[str, ...], ...] = ()
    """`X` (itself), `NV18`, `PIX`, ... from each card to each."""
    peers: tuple[tuple[str, ...], ...] = ()
    """`OK`, or why a card cannot read the other's memory; empty: not told."""

    def among(self, cards: Sequence[int]) -> Links:
        """The part of the matrix for some cards, in their order."""
        places = [self.cards.index(card) for card in cards if card in self.cards]

        def part(matrix: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
            return tuple(tuple(matrix[row][column] for column in places) for row in places) if matrix else ()

        return Links(tuple(self.cards[place] for place in places), part(self.ways), part(self.peers))

    @property
    def slowest(self) -> str:
        """The slowest way between two of the cards; empty: there are not two, or nothing is told."""
        between = [way for row in self.ways for way in row if way != "X"]
        return max(between, key=_slowness, default="")

    @property
    def refused(self) -> str:
        """Why some two cards cannot read each other's memory; empty: all can, or nothing is told."""
        return next((status for row in self.peers for status in row if status in REFUSED), "")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether cards send to each other without the CPU in the way."""

    fast: bool
    why: str
    barred: bool = False
    """The cards cannot read each other's memory: what they send goes through the host's."""


def parse_links(topology: str, peers: str) -> Links:
    """Both matrices; network cards and affinities stand beside the cards in the same rows."""
    cards, ways = _matrix(topology)
    reading, statuses = _matrix(peers)
    return Links(cards, ways, statuses if reading == cards else ())


def verdict(links: Links, names: Sequence[str]) -> Verdict:
    """How fast the slowest way between cards of these names is; what a run sends decides what it costs."""
    if len(names) < 2:
        return Verdict(True, "one card: nothing is sent to another one")
    if not links.slowest:
        return Verdict(False, "nvidia-smi does not tell how the cards are joined")
    slowest = links.slowest
    barred = REFUSED.get(links.refused, "")
    if not barred and any(NO_PEER_TO_PEER.search(name) for name in names):
        barred = "not supported by GeForce RTX 40 and 50"
    way = f"the slowest way is {slowest} ({MEANING[_kind(slowest)]})"
    direct = f"cards cannot read each other's memory: {barred}" if barred else _told(links)
    return Verdict(_kind(slowest) in FAST and not barred, f"{way}; {direct}", bool(barred))


def matrix_lines(links: Links) -> list[str]:
    """The matrix for a terminal; of more than eight cards it tells the kind of each way alone."""
    many = len(links.cards) > 8
    heads = [str(card) if many else f"GPU{card}" for card in links.cards]
    cells = [["-" if way == "X" else _kind(way)[:3] if many else way for way in row] for row in links.ways]
    width = max((len(text) for text in [*heads, *(cell for row in cells for cell in row)]), default=0)
    rows = [["", *heads], *([head, *row] for head, row in zip(heads, cells, strict=True))]
    return [" ".join(f"{text:>{width}}" for text in row).rstrip() for row in rows]


def _matrix(text: str) -> tuple[tuple[int, ...], tuple[tuple[str, ...], ...]]:
    """Numbers of the cards, and the cells between them."""
    lines = [ESCAPES.sub("", line).split() for line in text.partition("Legend")[0].splitlines()]
    header = next((words for words in lines if words and words[0] == "GPU0"), [])
    columns = header[: header.index("CPU")] if "CPU" in header else header  # "CPU Affinity" ends the devices
    places = [place for place, name in enumerate(columns) if re.fullmatch(r"GPU\d+", name)]
    cards = tuple(int(columns[place][3:]) for place in places)
    rows = {words[0]: words[1:] for words in lines if words and words is not header}
    cells = []
    for card in cards:
        row = rows.get(f"GPU{card}", [])
        if len(row) < len(columns):
            return (), ()
        cells.append(tuple(row[place] for place in places))
    return cards, tuple(cells)


def _told(links: Links) -> str:
    return "cards read each other's memory" if links.peers else "whether cards read each other is not told"


def _kind(way: str) -> str:
    return "NV" if way.startswith("NV") else way if way in MEANING else "SYS"


def _slowness(way: str) -> tuple[int, int]:
    """By kind, and among NVLinks by their number."""
    number = re.search(r"\d+", way)
    return list(MEANING).index(_kind(way)), -int(number[0]) if number else 0
