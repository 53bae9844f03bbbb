"""What does `nvidia-smi` say of the driver and of each card, or why does it say nothing?

Fields are those of `nvidia-smi -q -x` (https://docs.nvidia.com/deploy/nvidia-smi/). A field that a card or a
driver does not have is None, never a guess. Needs the standard library alone.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

SECONDS = 60.0
"""How long nvidia-smi may take: without persistence mode it wakes every card first, a few seconds each."""
MIB = 2**20
NVIDIA_VENDOR = "0x10de"
END = "</nvidia_smi_log>"
THROTTLES = {
    "hw_slowdown": "slowed down by the hardware",
    "hw_thermal_slowdown": "too hot (hardware)",
    "hw_power_brake_slowdown": "power brake of the server",
    "sw_thermal_slowdown": "too hot (driver)",
}
"""Reasons for a slower clock that are a fault of the machine; idling and the power limit are none."""
UNTOLD = ("", "N/A", "None", "Not Supported", "Not Available", "Not Found", "Insufficient Permissions")
"""What stands in place of a value that a card or a driver does not have, in brackets or without."""
DEPRECATED = "Requested functionality has been deprecated"
"""The same, of drivers from 575 on."""
NUMBERS = (
    "fb_memory_usage/total",
    "fb_memory_usage/used",
    "fb_memory_usage/free",
    "temperature/gpu_temp",
    "utilization/gpu_util",
    "ecc_errors/volatile/dram_uncorrectable",
    "pci/pci_gpu_link_info/link_widths/current_link_width",
)
"""Fields in which a card that answers has a number; any other words there are an error of the card."""
OUT_OF_ORDER = ("GPU requires reset", "GPU is lost", "ERR!")
"""What a card that has failed answers in any field."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process that holds memory of a card."""

    pid: int
    name: str
    memory_bytes: int | None
    kind: str
    """`C` computes, `G` draws (a desktop), `C+G`; empty: it is not told."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A MIG device: a part of a card that is a card of its own."""

    index: int
    uuid: str
    """Empty: this driver does not tell it."""
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class SmiCard:
    """One card; None or empty: it is not told."""

    index: int
    name: str
    uuid: str
    faults: tuple[str, ...]
    """Errors that it answers in place of numbers, and the reset that it asks for."""
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    mig: bool
    slices: tuple[Slice, ...]
    ecc: bool | None
    uncorrectable_now: int | None
    """ECC errors since the driver was loaded that could not be corrected."""
    uncorrectable_ever: int | None
    repair_pending: bool
    """Rows or pages of memory wait for a reset to be replaced by spare ones."""
    repair_failed: bool
    """There are no spare ones left."""
    throttled: tuple[str, ...]
    """Why its clock is held down, of `THROTTLES`."""
    temperature_c: int | None
    power_limit_watts: float | None
    pcie_generation_card: int | None
    pcie_generation_host: int | None
    pcie_width_card: int | None
    pcie_width_now: int | None
    fabric_state: str
    """Of cards behind NVSwitches: `Completed`, `In Progress`, `Not Started`."""
    fabric_status: str
    compute_mode: str
    processes: tuple[Process, ...]


@dataclass(frozen=True, slots=True)
class Smi:
    """The driver and its cards."""

    driver: str = ""
    cuda: str = ""
    """Newest CUDA that the driver runs."""
    cards: tuple[SmiCard, ...] = ()
    said: str = ""
    """What it printed besides its answer: errors and warnings."""
    code: int = 0
    """Its exit code."""
    trouble: str = ""
    """Why there is no answer: `absent`, `silent`, `failed`; empty when there is one."""
    driver_loaded: bool = False
    pci_cards: int = 0
    """NVIDIA GPUs on the PCI bus, with a driver or without."""

    @property
    def cuda_major(self) -> int:
        """0: not told."""
        major = self.cuda.partition(".")[0]
        return int(major) if major.isdigit() else 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What one call of nvidia-smi came to."""

    code: int | None
    """None: it did not end in time."""
    out: str = ""
    err: str = ""


def read_smi() -> Smi:
    """Ask nvidia-smi for everything."""
    loaded, on_bus = _driver_loaded(), _pci_cards()
    if shutil.which("nvidia-smi") is None:
        return Smi(trouble="absent", driver_loaded=loaded, pci_cards=on_bus)
    answer = ask("-q", "-x")
    if answer.code is None:
        return Smi(trouble="silent", driver_loaded=loaded, pci_cards=on_bus)
    before, begin, rest = answer.out.partition("<nvidia_smi_log")
    inside, end, after = rest.partition(END)
    said = _words(f"{before}\n{after}\n{answer.err}")
    log = _parsed(begin + inside + end)
    if log is None or (answer.code != 0 and log.find("gpu") is None):
        said = said or f"exit code {answer.code}, and nothing that can be read"
        return Smi(said=said, code=answer.code, trouble="failed", driver_loaded=loaded, pci_cards=on_bus)
    cards = tuple(_card(number, gpu) for number, gpu in enumerate(log.findall("gpu")))
    if any(not one.uuid for card in cards for one in card.slices):
        cards = _with_uuids(cards, ask("-L").out)
    return Smi(
        _text(log, "driver_version"), _text(log, "cuda_version"), cards, said, answer.code, "", True, on_bus
    )


def ask(*words: str) -> Answer:
    """Run nvidia-smi; one that hangs, even where no signal ends it, is left behind."""
    try:
        process = subprocess.Popen(
            ["nvidia-smi", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:  # not a program, or one for another machine
        return Answer(126, err=str(error))
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Answer(None)
    finally:  # also behind a signal: its session is its own, and nobody else would end it
        if process.returncode is None:
            _end(process)
    return Answer(process.returncode, out, err)


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1)


def _with_uuids(cards: tuple[SmiCard, ...], listed: str) -> tuple[SmiCard, ...]:
    """Slices with the uuids of `nvidia-smi -L`, which many drivers leave out of their XML."""
    uuids: dict[tuple[int, int], str] = {}
    number = 0
    for line in listed.splitlines():
        if whole := re.match(r"GPU (\d+):", line):
            number = int(whole[1])
        elif part := re.match(r"\s+MIG .*Device\s+(\d+): \(UUID: (MIG-[^)]+)\)", line):
            uuids[number, int(part[1])] = part[2]

    def told(index: int, one: Slice) -> Slice:
        return replace(one, uuid=one.uuid or uuids.get((index, one.index), ""))

    return tuple(replace(card, slices=tuple(told(card.index, one) for one in card.slices)) for card in cards)


def _driver_loaded() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def _pci_cards() -> int:
    """Display and 3D controllers of NVIDIA: their class begins with 03."""
    count = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
            count += vendor == NVIDIA_VENDOR and kind.startswith("0x03")
    return count


def _parsed(xml: str) -> ElementTree.Element | None:
    """The log; None where it is none, or where it breaks off."""
    bare = re.compile(r"&(?!#?\w+;)")  # names of processes are not always escaped
    try:
        return ElementTree.fromstring(bare.sub("&amp;", xml)) if xml else None
    except ElementTree.ParseError:
        return None


def _words(text: str) -> str:
    lines = (line.strip() for line in text.splitlines())
    return " ".join(line for line in lines if line and not line.startswith(("<?xml", "<!DOCTYPE")))


def _card(number: int, gpu: ElementTree.Element) -> SmiCard:
    return SmiCard(
        index=number,
        name=_text(gpu, "product_name"),
        uuid=_text(gpu, "uuid"),
        faults=tuple(dict.fromkeys(_faults(gpu))),
        total_bytes=_bytes(gpu, "fb_memory_usage/total"),
        used_bytes=_bytes(gpu, "fb_memory_usage/used"),
        free_bytes=_bytes(gpu, "fb_memory_usage/free"),
        mig=_text(gpu, "mig_mode/current_mig") == "Enabled",
        slices=tuple(
            Slice(_number(one, "index") or 0, _text(one, "uuid"), _bytes(one, "fb_memory_usage/total"))
            for one in gpu.findall("mig_devices/mig_device")
        ),
        ecc=_either(_text(gpu, "ecc_mode/current_ecc"), "Enabled", "Disabled"),
        uncorrectable_now=_uncorrectable(gpu.find("ecc_errors/volatile")),
        uncorrectable_ever=_uncorrectable(gpu.find("ecc_errors/aggregate")),
        repair_pending="Yes" in (_text(gpu, "remapped_rows/remapped_row_pending"), _retirement(gpu)),
        repair_failed=_text(gpu, "remapped_rows/remapped_row_failure") == "Yes",
        throttled=_throttles(gpu),
        temperature_c=_number(gpu, "temperature/gpu_temp"),
        power_limit_watts=_watts(gpu, "current_power_limit", "power_limit", "enforced_power_limit"),
        pcie_generation_card=_pcie(gpu, "pcie_gen/max_device_link_gen", "pcie_gen/max_link_gen"),
        pcie_generation_host=_pcie(gpu, "pcie_gen/max_host_link_gen", "pcie_gen/max_link_gen"),
        pcie_width_card=_pcie(gpu, "link_widths/max_link_width"),
        pcie_width_now=_pcie(gpu, "link_widths/current_link_width"),
        fabric_state=_text(gpu, "fabric/state"),
        fabric_status=_text(gpu, "fabric/status"),
        compute_mode=_text(gpu, "compute_mode"),
        processes=tuple(
            Process(
                _number(one, "pid") or 0,
                _text(one, "process_name") or "unknown",
                _bytes(one, "used_memory"),
                _text(one, "type"),
            )
            for one in gpu.findall("processes/process_info")
        ),
    )


def _faults(gpu: ElementTree.Element) -> Iterator[str]:
    """What a card that has failed says of itself; newer drivers name the way out."""
    for path in NUMBERS:
        text = _text(gpu, path)
        if text and not re.match(r"-?\d", text):
            yield text
    yield from (text for text in map(_plain, gpu.itertext()) if text in OUT_OF_ORDER)
    if _text(gpu, "gpu_reset_status/reset_required") == "Yes":
        yield "a reset is required"
    action = _text(gpu, "gpu_recovery_action")
    if action:
        yield f"recovery action: {action}"


def _throttles(gpu: ElementTree.Element) -> tuple[str, ...]:
    """Drivers from 535 on call them event reasons, older ones throttle reasons."""
    return tuple(
        reason
        for reason in THROTTLES
        for word in ("event", "throttle")
        if _text(gpu, f"clocks_{word}_reasons/clocks_{word}_reason_{reason}") == "Active"
    )


def _uncorrectable(errors: ElementTree.Element | None) -> int | None:
    """Over all kinds of memory; cards before Ampere count double bits. None: nothing is told."""
    if errors is None:
        return None
    kinds = [
        _number(errors, name)
        for name in (
            "sram_uncorrectable",
            "sram_uncorrectable_parity",
            "sram_uncorrectable_secded",
            "dram_uncorrectable",
            "double_bit/total",
        )
    ]
    told = [kind for kind in kinds if kind is not None]
    return sum(told) if told else None


def _retirement(gpu: ElementTree.Element) -> str:
    return _text(gpu, "retired_pages/pending_retirement") or _text(gpu, "retired_pages/pending_blacklist")


def _pcie(gpu: ElementTree.Element, *paths: str) -> int | None:
    found = (_number(gpu, f"pci/pci_gpu_link_info/{path}") for path in paths)
    return next((value for value in found if value is not None), None)


def _text(element: ElementTree.Element, path: str) -> str:
    """Empty where it is missing, `N/A`, `[Not Supported]` and the like; errors stay."""
    text = _plain(element.findtext(path) or "")
    return "" if text in UNTOLD or text.startswith(DEPRECATED) else text


def _plain(text: str) -> str:
    return text.strip().strip("[]")


def _number(element: ElementTree.Element, path: str) -> int | None:
    found = re.match(r"-?\d+", _text(element, path))
    return int(found[0]) if found else None


def _watts(gpu: ElementTree.Element, *names: str) -> float | None:
    """Drivers from 530 on call the readings those of the GPU."""
    for place in ("gpu_power_readings", "power_readings"):
        for name in names:
            found = re.match(r"\d+(\.\d+)?", _text(gpu, f"{place}/{name}"))
            if found:
                return float(found[0])
    return None


def _bytes(element: ElementTree.Element, path: str) -> int | None:
    """Memory is told in MiB."""
    value = _number(element, path)
    return None if value is None else value * MIB


def _either(text: str, yes: str, no: str) -> bool | None:
    return {yes: True, no: False}.get(text)
