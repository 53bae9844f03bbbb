"""Are the cards of this machine all there, whole, free and fast, and is its driver new enough?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from finetune.doctor.check import FAIL, PASS, WARN, Check
from finetune.doctor.sizes import GB, gb_text
from finetune.hardware.links import matrix_lines, verdict
from finetune.hardware.probe import why_unusable
from finetune.hardware.smi import THROTTLES, Process, SmiCard
from finetune.hardware.survey import MachineReport, numbers_differ

OLDEST_CUDA, WHEELS_CUDA = 12, 13
"""No torch that this package takes is built for less, and the newest ones ask for more unless told."""
CHANGE = "Change the machine, and tell the provider."
UNSEEN_BYTES = GB
"""Memory in use without a process that would be visible: more than driver and firmware take, or a desktop."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """An error of nvidia-smi, by words that it prints."""

    words: str
    why: str
    fix: str


TROUBLES = (
    Trouble(
        "version mismatch",
        "the driver was updated, and the kernel still runs the old one",
        "Restart the machine (sudo reboot); inside a container restart its host, or change the machine.",
    ),
    Trouble(
        "Unable to determine the device handle",
        "a card no longer answers (it may have fallen off the bus: sudo dmesg | grep -i xid)",
        f"Restart the machine; if the card does not come back: {CHANGE}",
    ),
    Trouble(
        "couldn't communicate with the NVIDIA driver",
        "the driver is installed but not loaded",
        "sudo modprobe nvidia; if that fails: install a driver for this kernel (sudo ubuntu-drivers install) "
        "and restart, or change the machine.",
    ),
    Trouble(
        "No devices were found",
        "the driver runs and sees no card",
        f"In a container: start it with --gpus all. On a whole machine: {CHANGE}",
    ),
    Trouble(
        "Insufficient Permissions",
        "this user may not open the cards",
        "Run as a user who may open them (ls -l /dev/nvidia*), or start the container with --gpus all.",
    ),
)
UNKNOWN_TROUBLE = Trouble("", "nvidia-smi fails", f"Restart the machine; if it stays so: {CHANGE}")


def card_checks(report: MachineReport, links: Check | None = None) -> list[Check]:
    """Everything about driver and cards; one line alone where there is nothing to look at.

    `links`: judged already by what a run sends over them.
    """
    if report.smi.trouble or not report.smi.cards:
        return [_no_cards(report)]
    if report.unmapped and not report.cards:
        names = ",".join(report.unmapped)
        detail = f"CUDA_VISIBLE_DEVICES={names}: of which card this is a slice nvidia-smi does not tell"
        fix = "Compare with nvidia-smi -L: a slice that is not listed there cannot be used."
        return [Check("GPUs", WARN, detail, fix), _driver(report)]
    if not report.cards:
        detail = f"CUDA_VISIBLE_DEVICES={report.visible} hides all {len(report.smi.cards)} cards"
        return [Check("GPUs", WARN, detail, "unset CUDA_VISIBLE_DEVICES"), _driver(report)]
    looked_at = [_gpus(report), _same_kind(report), _driver(report), _memory(report), _mig(report)]
    looked_at += [_errors(report), _throttling(report), _pcie(report), links or _links(report)]
    return [*looked_at, _fabric(report), _compute_mode(report)]


def _no_cards(report: MachineReport) -> Check:
    smi = report.smi
    if smi.trouble == "silent":
        fix = f"Restart the machine; if it stays so: {CHANGE}"
        return Check("GPUs", FAIL, "nvidia-smi does not answer: the driver or a card hangs", fix)
    if smi.trouble == "absent" and smi.driver_loaded:
        detail = "an NVIDIA driver is loaded, and nvidia-smi is not on PATH: the cards cannot be looked at"
        fix = "Start the container with --gpus all (it brings nvidia-smi), or add its folder to PATH."
        return Check("GPUs", WARN, detail, fix)
    if smi.trouble == "absent" and smi.pci_cards:
        detail = f"{_count(smi.pci_cards, 'NVIDIA card')} on the PCI bus, and no driver"
        fix = "Install the driver (sudo ubuntu-drivers install) and restart; in a container: --gpus all."
        return Check("GPUs", FAIL, detail, fix)
    if smi.trouble == "absent":
        return Check("GPUs", PASS, "no NVIDIA driver; models marked for a CPU train here")
    said = smi.said or "No devices were found"
    known = next((one for one in TROUBLES if one.words in said), UNKNOWN_TROUBLE)
    return Check("GPUs", FAIL, f"{known.why}; nvidia-smi says: {said}", known.fix)


def _gpus(report: MachineReport) -> Check:
    cards, there = report.cards, len(report.smi.cards)
    names = ", ".join(f"{_many(cards, name)}x {name}" for name in dict.fromkeys(card.name for card in cards))
    free = [card.free_bytes for card in cards if card.free_bytes is not None and not card.mig]
    least = "at least " if len(set(free)) > 1 else ""
    room = f", {least}{gb_text(min(free))} free of each" if len(free) == len(cards) else ""
    hidden = f" (CUDA_VISIBLE_DEVICES={report.visible} leaves {len(cards)} of {there})"
    detail = f"{names}{room}{hidden if len(cards) < there else ''}"
    broken = [(card.index, ", ".join(card.faults)) for card in cards if card.faults]
    if broken:
        numbers = ",".join(str(card) for card, _ in broken)
        fix = f"sudo nvidia-smi -i {numbers} --gpu-reset (nothing may run on it), or restart the machine"
        why = f"{detail}; a card does not answer or needs a reset: {_by_card(broken)}"
        return Check("GPUs", FAIL, why, f"{fix}; if it stays so: {CHANGE}")
    said, code = report.smi.said, report.smi.code
    known = next((one for one in TROUBLES if one.words in said), None)
    if known is not None:
        return Check("GPUs", FAIL, f"{detail}; {known.why}: {said}", known.fix)
    if said or code:
        exits = f" (exit code {code})" if code else ""
        fix = f"Restart the machine if a run fails here; if it stays so: {CHANGE}"
        return Check("GPUs", WARN, f"{detail}; nvidia-smi says{exits}: {said or 'nothing'}", fix)
    return Check("GPUs", PASS, detail)


def _same_kind(report: MachineReport) -> Check:
    kinds = dict.fromkeys((card.name, card.total_bytes) for card in report.cards)
    if len(kinds) == 1:
        return Check("same kind", PASS, "all cards are of one kind" if len(report.cards) > 1 else "one card")
    told = "; ".join(f"{name} with {_size(size)}" for name, size in kinds)
    first = [card for card in report.cards if card.name == report.cards[0].name]
    fix = f"The slowest and smallest card sets the pace; use cards of one kind: {_choosing(report, first)}"
    detail = f"cards differ: {told}"
    if report.unmapped:
        detail += (
            f"; which of them CUDA_VISIBLE_DEVICES={report.visible} means is not known, so all are judged:"
        )
        detail += " CUDA counts the fastest first, nvidia-smi by bus (CUDA_DEVICE_ORDER=PCI_BUS_ID: both)"
    return Check("same kind", WARN, detail, fix)


def _driver(report: MachineReport) -> Check:
    smi = report.smi
    detail = f"driver {smi.driver or 'of unknown version'}"
    if not smi.cuda_major:
        detail += " tells no CUDA that it runs: libcuda may be missing here"
        fix = "In a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility (docker run -e); else reinstall it."
        return Check("driver", WARN, detail, fix)
    detail += f", runs CUDA up to {smi.cuda}"
    if smi.cuda_major < OLDEST_CUDA:
        fix = "Update the driver to 580 or newer (sudo ubuntu-drivers install), or change the machine."
        return Check("driver", FAIL, f"{detail}; torch needs CUDA {OLDEST_CUDA} or newer", fix)
    if report.torch_cuda:
        unusable = why_unusable(report.torch_cuda, smi.cuda_major)
        return Check("driver", FAIL, f"{detail}; {unusable}", _older_wheels()) if unusable else _fine(detail)
    if report.torch:
        detail += "; the torch of this Python is built without CUDA"
        return Check("driver", WARN, detail, "Train with a torch that has CUDA: make install")
    if smi.cuda_major < WHEELS_CUDA:
        return Check(
            "driver", WARN, f"{detail}; a torch for CUDA {WHEELS_CUDA} would not run", _older_wheels()
        )
    return _fine(detail)


def _fine(detail: str) -> Check:
    return Check("driver", PASS, detail)


def _older_wheels() -> str:
    return (
        "Update the driver to 580 or newer, or take a torch for CUDA 12: pip install 'torch>=2.11,<3' "
        "--index-url https://download.pytorch.org/whl/cu128"
    )


def _memory(report: MachineReport) -> Check:
    """Free memory of each card, and who holds the rest."""
    told = [
        card for card in report.cards if card.free_bytes is not None and card.total_bytes and not card.mig
    ]
    if not told:
        divided = "; that of a card's slices is told by MIG" if any(card.mig for card in report.cards) else ""
        # of slices there is nothing to be told here; else it could be, and was not
        return Check("memory", PASS if divided else WARN, f"how much is free is not told{divided}")
    short = [card for card in told if 2 * (card.free_bytes or 0) < (card.total_bytes or 0)]
    taken = [line for card in told for line in _holders(card)]
    if not taken and not short:
        return Check("memory", PASS, "nothing else is on the cards")
    detail = "; ".join(taken) or "; ".join(f"GPU {card.index}: {_room(card)}" for card in short)
    pids = dict.fromkeys(str(one.pid) for card in told for one in _in_the_way(card) if one.pid)
    fix = (
        f"End what is yours (kill {' '.join(pids)}), or leave those cards out" if pids else "Leave those out"
    )
    free = [card for card in told if not list(_holders(card))]
    fix += f": {_choosing(report, free)}" if free else "."
    return Check("memory", FAIL if short else WARN, detail, fix if pids or free else CHANGE)


def _in_the_way(card: SmiCard) -> list[Process]:
    """All but a desktop: it draws with little memory, and training goes on beside it."""
    return [one for one in card.processes if one.kind != "G" or (one.memory_bytes or 0) > UNSEEN_BYTES]


def _holders(card: SmiCard) -> Iterator[str]:
    for one in _in_the_way(card):
        held = f"process {one.pid} ({one.name}) holds {_size(one.memory_bytes)}"
        yield f"GPU {card.index}: {held}; {_room(card)}"
    told = [one.memory_bytes for one in card.processes]
    unseen = (card.used_bytes or 0) - sum(size or 0 for size in told)
    if None not in told and unseen > UNSEEN_BYTES:
        held = f"{_size(unseen)} held by a process of another container, or by one that crashed"
        yield f"GPU {card.index}: {held}; {_room(card)}"


def _mig(report: MachineReport) -> Check:
    split = [card for card in report.cards if card.mig]
    if not split:
        return Check("MIG", PASS, "no card is divided")
    told = _by_card([(card.index, f"{_count(len(card.slices), 'slice')}{_sizes(card)}") for card in split])
    fix = f"To have it whole: sudo nvidia-smi -i {','.join(str(card.index) for card in split)} -mig 0"
    if not all(card.slices for card in split):
        return Check("MIG", FAIL, f"divided: {told}; without slices no program can use it", f"{fix}.")
    named = [f"one of {_size(one.memory_bytes)} of GPU {number}" for number, one in report.slices]
    seen = f" (CUDA_VISIBLE_DEVICES names {', '.join(named)})" if named else ""
    detail = f"divided: {told}{seen}; a process sees one slice, and slices cannot exchange gradients"
    return Check("MIG", WARN, detail, f"Train with launch.num_processes=1 on one slice. {fix}")


def _errors(report: MachineReport) -> Check:
    """Uncorrectable errors, and memory that could not be repaired."""
    failed, waiting, past = [], [], []
    for card in report.cards:
        now, ever = card.uncorrectable_now, card.uncorrectable_ever
        if card.repair_failed:
            failed.append((card.index, "faulty memory could not be replaced (row remapping failed)"))
        if now:
            failed.append((card.index, f"{_count(now, 'uncorrectable error')} since the driver started"))
        if card.repair_pending:
            waiting.append((card.index, "faulty memory waits for a reset to be replaced"))
        if ever and not now:
            past.append((card.index, f"{_count(ever, 'uncorrectable error')} in its life, none lately"))
    if failed:
        return Check("ECC", FAIL, _by_card(failed + waiting), CHANGE)
    if waiting:
        return Check("ECC", FAIL, _by_card(waiting), f"Restart the machine; if it stays so: {CHANGE}")
    if past:
        return Check("ECC", WARN, _by_card(past), "Watch it: run doctor again after a day of training.")
    if any(card.ecc is False for card in report.cards):
        return Check("ECC", PASS, "switched off: faults of memory would go unseen")
    told = any(card.uncorrectable_now is not None for card in report.cards)
    return Check("ECC", PASS, "no uncorrectable errors" if told else "these cards do not count errors")


def _throttling(report: MachineReport) -> Check:
    held = [card for card in report.cards if card.throttled]
    if not held:
        degrees = [card.temperature_c for card in report.cards if card.temperature_c is not None]
        return Check("throttling", PASS, f"none; {max(degrees)} C at most" if degrees else "none")
    detail = _by_card(
        [
            (card.index, ", ".join([*(THROTTLES[reason] for reason in card.throttled), _degrees(card)]))
            for card in held
        ]
    )
    return Check("throttling", WARN, f"clocks are held down: {detail}", f"If it stays so: {CHANGE}")


def _pcie(report: MachineReport) -> Check:
    """Width and generation; the generation of the moment falls while a card idles and says nothing."""
    narrow = []
    for card in report.cards:
        width, most = card.pcie_width_now, card.pcie_width_card
        own, host = card.pcie_generation_card, card.pcie_generation_host
        if width and most and width < most:
            narrow.append((card.index, f"{width} of {most} lanes"))
        elif own and host and host < own:
            narrow.append((card.index, f"generation {host} of {own}"))
    if narrow:
        fix = f"Loading, offload and what cards send over PCIe are slower by as much; if it matters: {CHANGE}"
        return Check("PCIe", WARN, f"narrower than the card: {_by_card(narrow)}", fix)
    first = report.cards[0]
    told = first.pcie_generation_card and first.pcie_width_now
    detail = f"generation {first.pcie_generation_card}, {first.pcie_width_now} lanes" if told else "not told"
    return Check("PCIe", PASS, detail)


def _links(report: MachineReport) -> Check:
    found = verdict(report.links, [card.name for card in report.cards])
    if found.fast:
        return Check("links", PASS, found.why + matrix_text(report))
    if not report.links.slowest:
        fix = "Run nvidia-smi topo -m yourself; doctor without --quick measures it."
        return Check("links", WARN, found.why, fix)
    why = (
        f"{found.why}; fsdp and zero3 send all weights over it in every step, full fine-tuning all gradients"
    )
    fix = "Use distributed=ddp or zero2 with adapter=lora here; for the others rent cards with NVLink."
    return Check("links", WARN, why + matrix_text(report), fix)


def matrix_text(report: MachineReport) -> str:
    """The matrix below a line of the checklist."""
    return "\n".join(["", *matrix_lines(report.links)]) if report.links.cards else ""


def _fabric(report: MachineReport) -> Check:
    """Cards behind NVSwitches start no CUDA before they are registered there."""
    told = [card for card in report.cards if card.fabric_state]
    if not told:
        return Check("fabric", PASS, "no NVSwitch that the driver tells of")
    bad = [
        card for card in told if card.fabric_state != "Completed" or card.fabric_status not in ("", "Success")
    ]
    if not bad:
        return Check("fabric", PASS, "completed")
    states = _by_card([(card.index, f"{card.fabric_state} {card.fabric_status}".strip()) for card in bad])
    detail = f"{states}; CUDA would fail with error 802, system not yet initialized"
    fix = (
        f"The provider's fault. {CHANGE} On a server of your own: sudo systemctl restart nvidia-fabricmanager"
    )
    return Check("fabric", FAIL, detail, fix)


def _compute_mode(report: MachineReport) -> Check:
    closed = [card for card in report.cards if card.compute_mode == "Prohibited"]
    if closed:
        numbers = ",".join(str(card.index) for card in closed)
        fix = f"sudo nvidia-smi -i {numbers} -c DEFAULT"
        return Check("compute mode", FAIL, f"GPU {numbers}: Prohibited, no program may compute on it", fix)
    modes = ", ".join(dict.fromkeys(card.compute_mode or "not told" for card in report.cards))
    return Check("compute mode", PASS, modes)


def _by_card(findings: list[tuple[int, str]]) -> str:
    """`GPU 0,1: this; GPU 3: that`: cards with the same finding together."""
    cards: dict[str, list[str]] = {}
    for card, finding in findings:
        cards.setdefault(finding, []).append(str(card))
    return "; ".join(f"GPU {','.join(numbers)}: {finding}" for finding, numbers in cards.items())


def _choosing(report: MachineReport, cards: list[SmiCard]) -> str:
    """How to name cards to CUDA: by uuid where it counts them in another order than nvidia-smi."""
    if not numbers_differ(report.smi.cards):
        return f"CUDA_VISIBLE_DEVICES={','.join(str(card.index) for card in cards)}"
    return f"CUDA_VISIBLE_DEVICES={','.join(_short(card.uuid, report) for card in cards)}"


def _short(uuid: str, report: MachineReport) -> str:
    """As much of a uuid as CUDA needs to tell the cards apart."""
    others = [card.uuid for card in report.smi.cards if card.uuid != uuid]
    ends = (end for end in range(12, len(uuid)) if not any(one.startswith(uuid[:end]) for one in others))
    return uuid[: next(ends, len(uuid))]


def _sizes(card: SmiCard) -> str:
    return f" of {', '.join(_size(one.memory_bytes) for one in card.slices)}" if card.slices else ""


def _degrees(card: SmiCard) -> str:
    return "its temperature is not told" if card.temperature_c is None else f"{card.temperature_c} C"


def _many(cards: tuple[SmiCard, ...], name: str) -> int:
    return sum(card.name == name for card in cards)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _size(value: int | None) -> str:
    return "memory that is not told" if value is None else gb_text(value)


def _room(card: SmiCard) -> str:
    return f"{_size(card.free_bytes)} of {_size(card.total_bytes)} is free"
