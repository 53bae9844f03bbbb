"""The matrices of nvidia-smi are read whatever stands beside the cards, and the slowest way is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.hardware.links import Links, matrix_lines, parse_links, verdict

MACHINES = Path(__file__).resolve().parents[2] / "machines"
H100, RTX4090 = "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"


def links(name: str) -> Links:
    folder = MACHINES / name
    return parse_links((folder / "topo.txt").read_text(), (folder / "p2p.txt").read_text())


def test_network_cards_and_escapes_beside_the_cards_are_passed_over() -> None:
    assert "NIC0" in (MACHINES / "8x_h100_sxm" / "topo.txt").read_text()
    assert "\x1b[4m" in (MACHINES / "8x_h100_sxm" / "topo.txt").read_text()
    found = links("8x_h100_sxm")
    assert found.cards == tuple(range(8))
    assert found.ways[2] == ("NV18", "NV18", "X", *["NV18"] * 5)
    assert found.peers[7] == (*["OK"] * 7, "X")


@pytest.mark.parametrize(
    ("name", "slowest", "refused"),
    [
        ("8x_a100_sxm", "NV12", ""),
        ("4x_a100_pcie", "SYS", ""),
        ("4x_rtx4090", "PHB", "CNS"),
        ("2x_rtx3090_nvlink", "NV4", ""),
        ("8x_h100_sxm_fabric", "SYS", "NS"),
    ],
)
def test_the_slowest_way_and_what_is_barred(name: str, slowest: str, refused: str) -> None:
    assert (links(name).slowest, links(name).refused) == (slowest, refused)


def test_the_slowest_is_that_of_the_cards_in_sight() -> None:
    server = links("4x_a100_pcie")
    assert server.among([0, 1]).slowest == "PXB"
    assert server.among([3, 1]).slowest == "SYS"
    assert server.among([2]).slowest == ""


def test_fewer_nvlinks_are_slower() -> None:
    mesh = (("X", "NV1", "NV2"), ("NV1", "X", "NV2"), ("NV2", "NV2", "X"))
    assert Links((0, 1, 2), mesh).slowest == "NV1"


@pytest.mark.parametrize(
    ("name", "card", "fast", "barred"),
    [
        ("8x_h100_sxm", H100, True, False),
        ("4x_a100_pcie", "NVIDIA A100 80GB PCIe", False, False),
        ("4x_rtx4090", RTX4090, False, True),
        ("2x_rtx3090_nvlink", "NVIDIA GeForce RTX 3090", True, False),
    ],
)
def test_a_way_through_the_cpu_is_slow(name: str, card: str, fast: bool, barred: bool) -> None:
    found = links(name)
    judged = verdict(found, [card] * len(found.cards))
    assert (judged.fast, judged.barred) == (fast, barred)


def test_cards_that_never_copy_to_each_other_are_known_by_name() -> None:
    bridges = Links((0, 1), (("X", "PIX"), ("PIX", "X")))
    assert verdict(bridges, [H100] * 2).fast
    judged = verdict(bridges, [RTX4090] * 2)
    assert (judged.fast, judged.barred) == (False, True)
    assert "GeForce RTX 40 and 50" in judged.why


def test_what_nvidia_smi_does_not_tell_is_not_guessed() -> None:
    assert parse_links("", "") == Links()
    assert parse_links("GPU0 GPU1 CPU Affinity\nGPU0 X", "") == Links()
    judged = verdict(Links(), [H100] * 2)
    assert not judged.fast
    assert "does not tell" in judged.why
    assert verdict(Links(), [H100]).fast
    untold = parse_links((MACHINES / "8x_h100_sxm" / "topo.txt").read_text(), "")
    assert untold.peers == ()
    assert "is not told" in verdict(untold, [H100] * 8).why


@pytest.mark.parametrize("count", [2, 8, 16])
def test_the_matrix_fits_a_terminal_beside_its_indent(count: int) -> None:
    ways = tuple(tuple("X" if row == column else "NV18" for column in range(count)) for row in range(count))
    lines = matrix_lines(Links(tuple(range(count)), ways))
    assert len(lines) == count + 1
    assert max(map(len, lines)) <= 80 - 9
    assert lines[1].split()[1] == "-"
