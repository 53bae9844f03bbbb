"""Rules on where a run takes place: device, processes, machines, strategy."""

from __future__ import annotations

import os
import shutil
import socket
import time
from datetime import datetime

from finetune.config.case import DEEPSPEED, FSDP, Case
from finetune.config.moments import moment
from finetune.config.packages import installed
from finetune.config.schema import Device, Strategy


def choose_device(case: Case) -> str:
    """`cuda` or `cpu`. A GPU that cannot be used never turns into a CPU run by itself."""
    wanted, devices = case.config.launch.device, case.devices
    if wanted is Device.cpu or (wanted is Device.auto and not devices.gpus and not devices.driver_gpus):
        if wanted is Device.auto and not case.config.model.cpu:
            case.lack(
                "launch.device=auto",
                "no GPU is here, and the model is not marked as small enough for a CPU (model.cpu=true)",
                "Use a machine with a GPU, or launch.device=cpu to train on the CPU all the same.",
            )
        return "cpu"
    if devices.gpus:
        return "cuda"
    if devices.driver_gpus:
        case.lack(
            f"launch.device={wanted.value}",
            f"the NVIDIA driver shows {devices.driver_gpus} GPU{'s' * (devices.driver_gpus > 1)} that torch "
            f"cannot use: {devices.unusable}",
            "Install a torch built for the driver's CUDA version (https://pytorch.org/get-started/locally), "
            "or use launch.device=cpu.",
        )
    else:
        case.lack("launch.device=cuda", "no GPU is here", "Use launch.device=cpu, or a machine with a GPU.")
    return "cuda"


def choose_processes(case: Case) -> int:
    """Processes over all machines."""
    launch, devices = case.config.launch, case.devices
    wanted = launch.num_processes
    if case.world is not None:
        if wanted is not None and wanted != case.world:
            why = f"the launcher started {case.world}"
            case.refuse(f"launch.num_processes={wanted}", why, f"Start {wanted}, or leave the key out.")
        return case.world
    if wanted is None:
        alone = case.config.distributed.strategy is Strategy.single or case.device == "cpu"
        wanted = 1 if alone else max(devices.gpus, 1) * max(launch.num_machines, 1)
    elif case.device == "cuda" and devices.gpus and launch.num_machines == 1 and wanted > devices.gpus:
        case.lack(
            f"launch.num_processes={wanted}",
            f"each process needs a GPU of its own, and {devices.gpus} can be used here",
            f"Use launch.num_processes={devices.gpus}.",
        )
    if case.device == "cpu" and wanted > devices.cpu_cores:
        case.notes.append(f"{wanted} processes share {devices.cpu_cores} CPU cores")
    return wanted


SOONEST_STOP_SECONDS = 20
"""From now to `checkpoint.stop_at`: the libraries alone take some seconds to load."""


def choose_stop(case: Case) -> float | None:
    """When the run has to have ended, in seconds since 1970."""
    text = case.config.checkpoint.stop_at
    if text is None:
        return None
    try:
        stop = moment(text, datetime.now().astimezone())
    except ValueError as error:
        case.refuse(f"checkpoint.stop_at={text}", str(error))
        return None
    if stop.timestamp() - time.time() < SOONEST_STOP_SECONDS:
        why = f"a run takes longer to start, to make a step and to save: at least {SOONEST_STOP_SECONDS} s"
        case.refuse(f"checkpoint.stop_at={text}", why, "Name a later moment.")
    case.notes.append(f"the run saves and ends before {stop:%Y-%m-%d %H:%M:%S %Z} (checkpoint.stop_at)")
    return stop.timestamp()


def choose_strategy(case: Case) -> Strategy:
    """The strategy meant by `auto`; others as they are."""
    wanted = case.config.distributed.strategy
    if wanted is not Strategy.auto:
        return wanted
    chosen = Strategy.ddp if case.processes > 1 else Strategy.single
    case.notes.append(
        f"distributed=auto is {chosen.value} with {case.processes} process{'es' * (case.processes > 1)}"
    )
    return chosen


def check_launch(case: Case) -> None:
    """Machines, ports, and what the strategy needs."""
    _machines(case)
    _port(case)
    distributed, strategy = case.config.distributed, case.strategy
    if strategy is Strategy.single and case.processes > 1:
        case.refuse(
            f"distributed=single with {case.processes} processes",
            "each would train the whole run by itself",
            "Use distributed=ddp (or fsdp, zero2, zero3), or launch.num_processes=1.",
        )
    if not distributed.reshard_after_forward and strategy not in FSDP:
        case.refuse(
            "distributed.reshard_after_forward=false",
            f"it is a setting of fsdp; the strategy is {strategy.value}",
            "Use distributed=fsdp, or leave the key out.",
        )
    if strategy in DEEPSPEED:
        _deepspeed(case)


def _machines(case: Case) -> None:
    launch = case.config.launch
    if launch.num_machines == 1 and launch.machine_rank:
        case.refuse(f"launch.machine_rank={launch.machine_rank}", "there is one machine, number 0")
    if launch.num_machines <= 1:
        return
    if launch.main_process_ip is None and case.world is None:
        why = "the machines must find machine 0"
        case.refuse(
            f"launch.num_machines={launch.num_machines}", why, "Set launch.main_process_ip to its address."
        )
    if case.config.run_name is None:
        case.refuse(
            f"launch.num_machines={launch.num_machines}",
            "the machines meet in one run folder on storage that they share, and it has no name yet",
            "Set run_name, the same on every machine.",
        )
    if launch.machine_rank >= launch.num_machines:
        why = f"machines are numbered 0 to {launch.num_machines - 1}"
        case.refuse(f"launch.machine_rank={launch.machine_rank}", why)
    if case.processes % launch.num_machines:
        case.refuse(
            f"launch.num_processes={case.processes}",
            f"it counts the processes of all {launch.num_machines} machines, which cannot share them evenly",
            f"Use a multiple of {launch.num_machines}.",
        )


def _port(case: Case) -> None:
    launch = case.config.launch
    port = launch.main_process_port
    if port is None or not 0 < port < 65536 or launch.machine_rank or case.world is not None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            why = f"the port cannot be used: {error.strerror}"
            case.lack(f"launch.main_process_port={port}", why, "Leave the key out: a free port is chosen.")


def _deepspeed(case: Case) -> None:
    name = case.strategy.value
    if installed("deepspeed") is None:
        case.lack(
            f"distributed={name}",
            "needs deepspeed, which is not installed",
            "Install it: pip install deepspeed",
        )
    compiler = os.environ.get("CXX", "g++")
    if case.device == "cpu" and shutil.which(compiler) is None:
        case.lack(
            f"distributed={name}",
            f"on CPU DeepSpeed compiles an operation with {compiler}, which is not here",
            "Install g++ (Debian, Ubuntu: apt-get install g++), or use an fsdp strategy.",
        )
