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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

SECONDS = 15.0
"""How long nvidia-smi may take: without persistence mode it wakes every card first, about a second each."""
MIB = 2**20
NVIDIA_VENDOR = "0x10de"
THROTTLES = {
    "hw_slowdown": "slowed down by the hardware",
    "hw_thermal_slowdown": "too hot (hardware)",
    "hw_power_brake_slowdown": "power brake of the server",
    "sw_thermal_slowdown": "too hot (driver)",
}
"""Reasons for a slower clock that are a fault of the machine; idling and the power limit are none."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process that holds memory of a card."""

    pid: int
    name: str
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Slice:
    """A MIG device: a part of a card that is a card of its own."""

    index: int
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class SmiCard:
    """One card; None or empty: it is not told."""

    index: int
    name: str
    uuid: str
    bus_id: str
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
    power_watts: float | None
    power_limit_watts: float | None
    pcie_generation_card: int | None
    pcie_generation_host: int | None
    pcie_generation_now: int | None
    """It falls while the card idles."""
    pcie_width_card: int | None
    pcie_width_now: int | None
    fabric_state: str
    """Of cards behind NVSwitches: `Completed`, `In Progress`, `Not Started`."""
    fabric_status: str
    compute_mode: str
    persistence: bool | None
    processes: tuple[Process, ...]


@dataclass(frozen=True, slots=True)
class Smi:
    """The driver and its cards."""

    driver: str = ""
    cuda: str = ""
    """Newest CUDA that the driver runs."""
    cards: tuple[SmiCard, ...] = ()
    said: str = ""
    """What it printed besides its answer: errors."""
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
    before, tag, xml = answer.out.partition("<nvidia_smi_log")
    said = _words(f"{before}\n{answer.err}")
    log = _parsed(tag + xml)
    if log is None or (answer.code != 0 and log.find("gpu") is None):
        said = said or f"exit code {answer.code}, and nothing that can be read"
        return Smi(said=said, trouble="failed", driver_loaded=loaded, pci_cards=on_bus)
    cards = tuple(_card(number, gpu) for number, gpu in enumerate(log.findall("gpu")))
    return Smi(_text(log, "driver_version"), _text(log, "cuda_version"), cards, said, "", True, on_bus)


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
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        return Answer(None)
    return Answer(process.returncode, out, err)


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
        bus_id=gpu.get("id", ""),
        total_bytes=_bytes(gpu, "fb_memory_usage/total"),
        used_bytes=_bytes(gpu, "fb_memory_usage/used"),
        free_bytes=_bytes(gpu, "fb_memory_usage/free"),
        mig=_text(gpu, "mig_mode/current_mig") == "Enabled",
        slices=tuple(
            Slice(_number(one, "index") or 0, _bytes(one, "fb_memory_usage/total"))
            for one in gpu.findall("mig_devices/mig_device")
        ),
        ecc=_either(_text(gpu, "ecc_mode/current_ecc"), "Enabled", "Disabled"),
        uncorrectable_now=_uncorrectable(gpu.find("ecc_errors/volatile")),
        uncorrectable_ever=_uncorrectable(gpu.find("ecc_errors/aggregate")),
        repair_pending="Yes" in (_text(gpu, "remapped_rows/remapped_row_pending"), _retirement(gpu)),
        repair_failed=_text(gpu, "remapped_rows/remapped_row_failure") == "Yes",
        throttled=_throttles(gpu),
        temperature_c=_number(gpu, "temperature/gpu_temp"),
        power_watts=_watts(gpu, "power_draw", "instant_power_draw", "average_power_draw"),
        power_limit_watts=_watts(gpu, "current_power_limit", "power_limit", "enforced_power_limit"),
        pcie_generation_card=_pcie(gpu, "pcie_gen/max_device_link_gen", "pcie_gen/max_link_gen"),
        pcie_generation_host=_pcie(gpu, "pcie_gen/max_host_link_gen", "pcie_gen/max_link_gen"),
        pcie_generation_now=_pcie(gpu, "pcie_gen/current_link_gen"),
        pcie_width_card=_pcie(gpu, "link_widths/max_link_width"),
        pcie_width_now=_pcie(gpu, "link_widths/current_link_width"),
        fabric_state=_text(gpu, "fabric/state"),
        fabric_status=_text(gpu, "fabric/status"),
        compute_mode=_text(gpu, "compute_mode"),
        persistence=_either(_text(gpu, "persistence_mode"), "Enabled", "Disabled"),
        processes=tuple(
            Process(
                _number(one, "pid") or 0, _text(one, "process_name") or "unknown", _bytes(one, "used_memory")
            )
            for one in gpu.findall("processes/process_info")
        ),
    )


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
    """Empty where it is missing, `N/A` or `[Not Supported]`."""
    text = (element.findtext(path) or "").strip()
    return "" if text in ("N/A", "None") or text.startswith("[") else text


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
