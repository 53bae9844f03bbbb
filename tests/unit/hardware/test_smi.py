"""What nvidia-smi prints becomes fields; what it does not tell stays unknown.

The machines are written after its documented format.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from finetune.hardware.smi import Smi, read_smi

MACHINES = Path(__file__).resolve().parents[2] / "machines"
GIB, MIB = 2**30, 2**20


def answered(monkeypatch: pytest.MonkeyPatch, at: Path, script: str) -> Smi:
    """What is read when `nvidia-smi` is this shell script."""
    program = at / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{at}{os.pathsep}{os.environ['PATH']}")
    return read_smi()


def machine(monkeypatch: pytest.MonkeyPatch, at: Path, name: str) -> Smi:
    return answered(monkeypatch, at, f"cat '{MACHINES / name / 'smi.xml'}'")


def test_a_healthy_card_is_read_in_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi = machine(monkeypatch, tmp_path, "8x_h100_sxm")
    card = smi.cards[7]
    assert (smi.driver, smi.cuda, smi.cuda_major, len(smi.cards), smi.trouble) == (
        "580.95.05",
        "13.0",
        13,
        8,
        "",
    )
    assert (card.index, card.name, card.faults) == (7, "NVIDIA H100 80GB HBM3", ())
    assert (card.total_bytes, card.used_bytes, card.free_bytes) == (81559 * MIB, MIB, 81007 * MIB)
    assert (card.ecc, card.uncorrectable_now, card.uncorrectable_ever) == (True, 0, 0)
    assert (card.repair_pending, card.repair_failed, card.throttled, card.mig) == (False, False, (), False)
    assert (card.pcie_generation_card, card.pcie_generation_host, card.pcie_width_now) == (5, 5, 16)
    assert (card.fabric_state, card.fabric_status) == ("Completed", "Success")
    assert (card.temperature_c, card.power_limit_watts) == (34, 700.0)
    assert (card.compute_mode, card.processes) == ("Default", ())


def test_an_older_driver_calls_throttling_and_power_differently(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    older = (MACHINES / "4x_a100_pcie" / "smi.xml").read_text()
    assert "clocks_event_reasons" not in older
    held = older.replace("sw_thermal_slowdown>Not Active", "sw_thermal_slowdown>Active", 1)
    (tmp_path / "smi.xml").write_text(held)
    cards = answered(monkeypatch, tmp_path, f"cat '{tmp_path / 'smi.xml'}'").cards
    assert [card.throttled for card in cards] == [("sw_thermal_slowdown",), (), (), ()]
    assert cards[0].power_limit_watts == 300.0


def test_idling_and_the_power_limit_are_no_throttling(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (MACHINES / "a100_mig" / "smi.xml").read_text()
    for reason in ("gpu_idle", "sw_power_cap"):
        text = text.replace(f"{reason}>Not Active", f"{reason}>Active")
    (tmp_path / "smi.xml").write_text(text)
    assert answered(monkeypatch, tmp_path, f"cat '{tmp_path / 'smi.xml'}'").cards[0].throttled == ()


def test_slices_errors_and_processes_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mig = machine(monkeypatch, tmp_path, "a100_mig").cards[0]
    assert mig.mig
    assert [(one.index, one.memory_bytes) for one in mig.slices] == [(0, 40448 * MIB), (1, 19968 * MIB)]
    first, second, third = machine(monkeypatch, tmp_path, "a100_faulty").cards
    assert (first.uncorrectable_now, second.uncorrectable_now, third.uncorrectable_ever) == (3, 0, 9)
    assert (first.repair_failed, third.repair_failed) == (False, True)
    assert second.throttled == ("hw_slowdown", "hw_thermal_slowdown")
    (process,) = machine(monkeypatch, tmp_path, "a6000_taken").cards[0].processes
    assert (process.pid, process.name, process.memory_bytes) == (4242, "python", 26000 * MIB)


def test_errors_of_every_kind_of_memory_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = (MACHINES / "a100_faulty" / "smi.xml").read_text()
    for kind in ("parity", "secded"):
        text = text.replace(f"sram_uncorrectable_{kind}>0<", f"sram_uncorrectable_{kind}>2<", 1)
    (tmp_path / "smi.xml").write_text(text)
    card = answered(monkeypatch, tmp_path, f"cat '{tmp_path / 'smi.xml'}'").cards[0]
    assert card.uncorrectable_now == 3 + 2 + 2


def test_what_is_not_told_is_not_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    xml = (
        "<nvidia_smi_log><gpu id='x'><product_name>Card</product_name>"
        "<ecc_mode><current_ecc>N/A</current_ecc></ecc_mode>"
        "<fb_memory_usage><used>[Not Supported]</used></fb_memory_usage></gpu></nvidia_smi_log>"
    )
    card = answered(monkeypatch, tmp_path, f'echo "{xml}"').cards[0]
    told = (card.total_bytes, card.used_bytes, card.ecc, card.uncorrectable_now, card.pcie_width_now)
    assert told == (None, None, None, None, None)
    assert (card.temperature_c, card.power_limit_watts, card.fabric_state, card.faults) == (
        None,
        None,
        "",
        (),
    )


@pytest.mark.parametrize(
    ("field", "answer", "faults"),
    [
        ("gpu_temp", "N/A", ()),
        ("gpu_temp", "[Not Supported]", ()),
        ("gpu_temp", "Requested functionality has been deprecated", ()),
        ("gpu_temp", "ERR!", ("ERR!",)),
        ("gpu_temp", "Unknown Error", ("Unknown Error",)),
        ("dram_uncorrectable", "[GPU requires reset]", ("GPU requires reset",)),
        ("fan_speed", "GPU is lost", ("GPU is lost",)),
        ("reset_required", "Yes", ("a reset is required",)),
        ("gpu_recovery_action", "Drain and Reset", ("recovery action: Drain and Reset",)),
    ],
)
def test_an_error_in_place_of_a_number_is_a_fault_of_the_card(
    field: str, answer: str, faults: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (MACHINES / "a100_faulty" / "smi.xml").read_text()
    text = re.sub(f"<{field}>[^<]*<", f"<{field}>{answer}<", text, count=1)
    (tmp_path / "smi.xml").write_text(text)
    cards = answered(monkeypatch, tmp_path, f"cat '{tmp_path / 'smi.xml'}'").cards
    assert [card.faults for card in cards] == [faults, (), ()]


@pytest.mark.parametrize("stream", ["1", "2"])
def test_what_it_says_beside_its_answer_is_kept_with_its_exit_code(
    stream: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = (
        f"cat '{MACHINES / 'inforom' / 'smi.xml'}'; echo 'WARNING: infoROM is corrupted' >&{stream}; exit 14"
    )
    smi = answered(monkeypatch, tmp_path, script)
    assert (len(smi.cards), smi.said, smi.code) == (2, "WARNING: infoROM is corrupted", 14)


def test_slices_get_their_uuids_from_the_list_where_the_xml_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = MACHINES / "a100_mig"
    script = f"cd '{folder}'\nif [ $1 = -L ]; then cat list.txt; else cat smi.xml; fi"
    slices = answered(monkeypatch, tmp_path, script).cards[0].slices
    assert [one.uuid[:12] for one in slices] == ["MIG-3ca1e6ac", "MIG-b0a7c1f4"]
    assert [one.uuid for one in machine(monkeypatch, tmp_path, "a100_mig").cards[0].slices] == ["", ""]


def test_a_name_of_a_process_that_is_not_escaped_spoils_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (MACHINES / "a6000_taken" / "smi.xml").read_text().replace(">python<", ">sh -c a && b<")
    (tmp_path / "smi.xml").write_text(text)
    card = answered(monkeypatch, tmp_path, f"cat '{tmp_path / 'smi.xml'}'").cards[0]
    assert card.processes[0].name == "sh -c a && b"


def test_retired_pages_of_older_cards_wait_for_a_reset(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (MACHINES / "a100_mig" / "smi.xml").read_text()
    (tmp_path / "smi.xml").write_text(text.replace("pending_blacklist>N/A", "pending_blacklist>Yes"))
    assert answered(monkeypatch, tmp_path, f"cat '{tmp_path / 'smi.xml'}'").cards[0].repair_pending


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
            "library version mismatch",
        ),
        ("echo 'No devices were found' >&2; exit 6", "No devices were found"),
        ("echo '<nvidia_smi_log><gpu>'", "exit code 0, and nothing that can be read"),
        ("exit 12", "exit code 12, and nothing that can be read"),
        ("echo '<nvidia_smi_log></nvidia_smi_log>'; echo 'GPU is lost' >&2; exit 15", "GPU is lost"),
    ],
)
def test_an_answer_that_is_none_is_told_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, said: str
) -> None:
    smi = answered(monkeypatch, tmp_path, script)
    assert (smi.trouble, smi.cards) == ("failed", ())
    assert said in smi.said


def test_a_file_that_is_no_program_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_bytes(b"\x7fELF of another machine")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    smi = read_smi()
    assert smi.trouble == "failed"
    assert "Exec format error" in smi.said


def test_one_that_hangs_is_ended_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("finetune.hardware.smi.SECONDS", 3.0)  # also a busy machine has begun by then
    alive = tmp_path / "alive"
    smi = answered(monkeypatch, tmp_path, f"while :; do echo . >>'{alive}'; sleep 0.05; done")
    assert smi.trouble == "silent"
    size = alive.stat().st_size
    time.sleep(0.3)
    assert alive.stat().st_size == size > 0
