"""Does the machine around the cards bear a run: RAM, cores, disk, limits, clock, Python, tools?"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator

from finetune.doctor.check import FAIL, PASS, WARN, Check
from finetune.doctor.sizes import GB, GIB, MIB, gb_text
from finetune.hardware.host import SUITABLE
from finetune.hardware.survey import MachineReport

DOCKER_SHARED_MEMORY = 64 * MIB
"""What docker gives a container unless told."""
ENOUGH_SHARED_MEMORY = GIB
CORES_PER_CARD = 4
SMALLEST_DISK, ENOUGH_DISK, ENOUGH_DISK_CPU = MIB, 50 * GB, 5 * GB
"""Records and report of a run without its weights come near the first (of twenty steps: 0.3 MB); what a run's
own weights take is its plan's to tell. The second holds 8 billion parameters three times in 16 bits.
"""
SLOW_DISK = 100 * 10**6
FEWEST_FILES = 1000
"""Files that an installation and a few runs make, and that must still be possible."""
FEW_OPEN, ENOUGH_OPEN = 256, 4096
"""Measured with the tiny model: one process trains with 16, two with two loader processes each fail with 128
and train with 256. A run whose processes cannot even meet fails at the exchange.
"""
OLDEST_GLIBC = (2, 28)
"""What torch's wheels are built against (manylinux_2_28)."""
EARLIEST, LATEST = 1_735_689_600, 4_102_444_800  # 2025 and 2100
DAY = 86_400
REMOTE = "checkpoint.remote=s3://BUCKET/FOLDER"


def host_checks(report: MachineReport) -> list[Check]:
    """Everything beside driver, cards and shared memory."""
    looked_at = [_memory(report), _cores(report), _disk(report), *_write_speed(report)]
    looked_at += [_folder(report), _provider(report), _open_files(report), _clock(report), _python(report)]
    return [*looked_at, _compiler(report), *_c_library(report)]


def _memory(report: MachineReport) -> Check:
    host = report.host
    cards = report.device_bytes
    swap = f", {gb_text(host.swap_bytes)} swap" if host.swap_bytes else ""
    detail = f"{gb_text(host.memory_bytes)}, {gb_text(host.free_memory_bytes)} free{swap}"
    if host.memory_bytes < 0.95 * cards:  # firmware and kernel keep some of what was paid for
        detail += f"; the cards have {gb_text(cards)}"
        fix = (
            "Offload and assembling a sharded model need as much RAM as the cards have: finetune plan tells."
        )
        return Check("RAM", WARN, detail, fix)
    if host.free_memory_bytes < host.memory_bytes / 4:
        return Check(
            "RAM", WARN, detail, "See what holds it (top -o %MEM), and end it or change the machine."
        )
    return Check("RAM", PASS, detail)


def _cores(report: MachineReport) -> Check:
    cores, cards = report.host.cores, len(report.cards)
    detail = f"{cores:g} usable"
    if not cards:
        return Check("CPU cores", PASS, detail)
    detail += f", {cores / cards:.3g} for each card"
    if cores < CORES_PER_CARD * cards:
        fix = f"Take a machine with {CORES_PER_CARD} to {2 * CORES_PER_CARD} cores for each card."
        return Check("CPU cores", WARN, f"{detail}: loading and launching would hold the cards up", fix)
    return Check("CPU cores", PASS, detail)


def shared_memory_check(report: MachineReport, *, exchanged: bool = False) -> Check:
    """NCCL exchanges data between processes through it where cards cannot reach each other.

    `exchanged`: the processes of the run were started, and have exchanged what they had to.
    """
    size, several = report.host.shared_memory_bytes, len(report.cards) > 1
    detail = gb_text(size) if size else "there is none"
    fix = "Start the container with docker run --shm-size=16g (or --ipc=host); else: change the machine."
    if size <= DOCKER_SHARED_MEMORY:
        detail += ", docker's own default (64 MiB)" if size == DOCKER_SHARED_MEMORY else ""
        if several and exchanged:
            return Check(
                "/dev/shm", WARN, f"{detail}: this run's processes did without more; others may not", fix
            )
        if several:
            return Check("/dev/shm", FAIL, f"{detail}: NCCL fails there with several cards", fix)
        return Check("/dev/shm", WARN, f"{detail}: enough for one process without loader workers", fix)
    if several and size < ENOUGH_SHARED_MEMORY:
        return Check("/dev/shm", WARN, f"{detail}: little for several cards", fix)
    return Check("/dev/shm", PASS, detail)


def _disk(report: MachineReport) -> Check:
    disk = report.host.disk
    kind = disk.kind or "file system of unknown kind"
    detail = f"{gb_text(disk.free_bytes)} free in {disk.nearest} ({kind})"
    if disk.problem:
        full = disk.problem in map(os.strerror, (errno.ENOSPC, errno.EDQUOT))
        fix = f"{'Free space there, or s' if full else 'S'}et output_dir to a folder that can be written."
        return Check("disk", FAIL, f"{detail}; writing fails: {disk.problem}", fix)
    if disk.free_bytes < SMALLEST_DISK:
        fix = "Free space, or set output_dir to a larger disk."
        return Check("disk", FAIL, f"{detail}: not even the records of a run fit", fix)
    if disk.free_files is not None and disk.free_files < FEWEST_FILES:
        fix = (
            "Remove folders with many small files (df -i shows the count), or set output_dir to another disk."
        )
        return Check("disk", FAIL, f"{detail}; only {disk.free_files} more files can be made", fix)
    enough = ENOUGH_DISK if report.cards else ENOUGH_DISK_CPU
    if disk.free_bytes < enough:
        detail += f"; less than {enough // GB} GB is short for weights and checkpoints"
        return Check(
            "disk", WARN, detail, "Set output_dir and HF_HOME to a larger disk; finetune plan tells sizes."
        )
    return Check("disk", PASS, detail)


def _write_speed(report: MachineReport) -> Iterator[Check]:
    """Nothing of a disk that cannot be written: that is told already."""
    disk = report.host.disk
    if disk.problem:
        return
    if disk.write_bytes_s is None:
        fix = "Free space, or set output_dir to a larger disk."
        yield Check("disk speed", WARN, "not measured: it would take too much of what is free", fix)
        return
    minutes = 100 * GB / disk.write_bytes_s / 60
    far = ", a network disk" if disk.on_network else ""
    detail = f"{disk.write_bytes_s / 1e6:,.0f} MB/s written{far}"
    if disk.write_bytes_s < SLOW_DISK:
        fix = "Set output_dir to a local SSD, or save less often (checkpoint.every_minutes)."
        yield Check("disk speed", WARN, f"{detail}: 100 GB of checkpoints take {minutes:,.0f} minutes", fix)
    else:
        yield Check("disk speed", PASS, detail)


def _folder(report: MachineReport) -> Check:
    """Whether the runs outlive the machine."""
    disk, provider = report.host.disk, report.provider
    away = f"send checkpoints away: {REMOTE}"
    safe = f"Set output_dir to a volume that is kept, or {away}"
    if disk.in_memory:
        return Check("run folder", WARN, f"{disk.folder} is in RAM ({disk.kind}): a restart erases it", safe)
    if provider is not None and report.folder_asked:
        detail = f"{disk.folder} outlives the {provider.name} machine only where that was asked for"
        return Check("run folder", WARN, f"{detail}: {provider.rule}", f"Ask for it, or {away}")
    if provider is not None and report.folder_kept is False:
        put = provider.advised or next((folder for folder in provider.kept if folder != "/"), "")
        fix = f"Set output_dir={put}/runs (once a volume is mounted there), or {away}" if put else safe
        detail = f"{disk.folder} is erased when the {provider.name} machine stops"
        return Check("run folder", WARN, detail, fix)
    if report.folder_kept:
        return Check("run folder", PASS, f"{disk.folder} outlives a stop of the {_name(report)} machine")
    if disk.in_container:
        detail = f"{disk.folder} lies in the container ({disk.kind}) and goes with it"
        return Check("run folder", WARN, detail, f"Mount a folder of the host (docker run -v). {safe}")
    return Check("run folder", PASS, f"{disk.folder}; whether it outlives the machine is not known")


def _provider(report: MachineReport) -> Check:
    provider = report.provider
    if provider is None:
        return Check("provider", PASS, "none that is known: whether it stops by itself is not known")
    detail = f"{provider.name}: {provider.rule}" if provider.rule else provider.name
    if provider.stops:
        fix = f"Save often, elsewhere, and go on: checkpoint.every_minutes=10 {REMOTE} checkpoint.resume=auto"
        return Check("provider", WARN, detail, fix)
    return Check("provider", PASS, detail)


def _open_files(report: MachineReport) -> Check:
    soft, hard = report.host.open_files, report.host.open_files_possible
    limitless = soft < 0
    detail = (
        "no limit" if limitless else f"{soft:,} (can be raised to {hard:,})" if hard > soft else f"{soft:,}"
    )
    if limitless or soft >= ENOUGH_OPEN:
        return Check("open files", PASS, detail)
    possible = 65_536 if hard < 0 else min(hard, 65_536)
    raises = possible > soft
    fix = (
        f"ulimit -n {possible}"
        if raises
        else "docker run --ulimit nofile=65536, or /etc/security/limits.conf"
    )
    if soft < FEW_OPEN:
        detail += ": enough for one process, too few where loader processes share it"
        return Check("open files", WARN, detail, fix)
    return Check("open files", WARN, f"{detail}: little for several processes", fix)


def _clock(report: MachineReport) -> Check:
    now = report.host.now
    detail = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    fix = "sudo timedatectl set-ntp true (a wrong clock fails every download: certificates look invalid)"
    if not EARLIEST < now < LATEST:
        return Check("clock", FAIL, f"{detail} cannot be", fix)
    if now + DAY < report.host.files_are_from:
        return Check("clock", FAIL, f"{detail} is before the files of this package were written", fix)
    return Check("clock", PASS, detail)


def _python(report: MachineReport) -> Check:
    lowest, highest = (".".join(map(str, version)) for version in SUITABLE)
    own = ".".join(map(str, report.host.python))
    if SUITABLE[0] <= report.host.python <= SUITABLE[1]:
        return Check("Python", PASS, own)
    if report.host.other_python:
        other = report.host.other_python
        return Check("Python", PASS, f"this one is {own}; {other} is there too, and make takes it")
    fix = "sudo apt-get install python3.12 python3.12-venv; where there is none: uv python install 3.12"
    return Check("Python", FAIL, f"{own}; {lowest} to {highest} is needed", fix)


def _compiler(report: MachineReport) -> Check:
    missing = report.host.missing_tools
    if missing:
        detail = f"{' and '.join(missing)} missing: set-up and DeepSpeed's CPU optimizer need them"
        return Check("compiler", WARN, detail, "sudo apt-get install build-essential")
    return Check("compiler", PASS, "make and g++ are there")


def _c_library(report: MachineReport) -> list[Check]:
    if report.host.glibc is None:
        return [Check("C library", WARN, "not glibc, or not known: torch has wheels for glibc alone")]
    version = ".".join(map(str, report.host.glibc))
    if report.host.glibc < OLDEST_GLIBC:
        fix = "Take an image of Ubuntu 20.04, Debian 10, or newer."
        return [Check("C library", FAIL, f"glibc {version}; torch needs 2.28 or newer", fix)]
    return [Check("C library", PASS, f"glibc {version}")]


def _name(report: MachineReport) -> str:
    return report.provider.name if report.provider else "this"
