"""What to do after a failure: the ways out that fit this run, the cheapest first."""

from __future__ import annotations

import re

from finetune.config.strategy import TRAITS
from finetune.hardware.mounts import SHARED_MEMORY
from finetune.training.figures import (
    Clue,
    address_limit,
    chosen_option,
    is_full,
    killed_for_memory,
    nccl_words,
    other_processes,
    read_plan,
)

MOST = 3
"""Ways that are told at most."""


def less_gpu_memory(clue: Clue) -> list[str]:
    """Cheapest first: what else is on the card, smaller pieces of the same batch, other strategies."""
    ways = [
        f"end process {pid} ({size}), or leave its card out with CUDA_VISIBLE_DEVICES"
        for pid, size in other_processes(clue.text)
    ]
    if (free := _mib(r"([\d.]+) ([KMG]iB) is reserved by PyTorch but", clue)) and free > _mib(
        r"Tried to allocate ([\d.]+) ([KMG]iB)", clue
    ):
        ways.append(
            "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment: the free pieces are too small"
        )
    return [*ways, *less_memory(clue)][:MOST]


def less_memory(clue: Clue) -> list[str]:
    """Changes of the config that take less, each with what it changes."""
    config, facts, batch = clue.config, clue.facts, clue.facts.batch
    ways = list(read_plan(clue.run_dir).get("advice", ()))
    if batch.per_device > 1:
        smaller = batch.per_device // 2 if batch.per_device % 2 == 0 else 1
        ways.append(
            f"trainer.per_device_train_batch_size={smaller} trainer.global_batch_size={batch.global_size} "
            f"(now {batch.per_device}; the same steps, in smaller pieces)"
        )
    if not config.trainer.activation_checkpointing:
        ways.append("trainer.activation_checkpointing=true (slower; keeps far fewer activations)")
    ways += _lighter_strategies(clue)
    length = config.data.max_length or facts.positions
    if length is not None and length > 1:
        ways.append(f"data.max_length={length // 2} (now {length})")
    return ways[:MOST]


def less_host_memory(clue: Clue) -> list[str]:
    ways = []
    if address_limit() is not None:
        ways.append("ulimit -v unlimited, before the run is started")
    if workers := clue.config.trainer.dataloader_num_workers:
        ways.append(f"trainer.dataloader_num_workers=0 (now {workers}; each one holds memory of its own)")
    if TRAITS[clue.facts.strategy].offloads:
        strategy = clue.facts.strategy.value
        ways.append(
            f"distributed={strategy.removesuffix('_offload')} (now {strategy}: it keeps states in RAM)"
        )
    if clue.facts.device == "cpu":
        ways += less_memory(clue)
    return [*ways, "a machine with more RAM, or nothing else on this one"][:MOST]


def after_a_kill(clue: Clue) -> list[str]:
    memory = less_host_memory(clue)
    found = killed_for_memory(clue)
    if found:
        return memory
    other = "find out who ends processes here: a job scheduler's limit, a memory watcher, a person"
    return [other] if found is False else [other, *memory][:MOST]


def smaller_shared_memory(clue: Clue) -> list[str]:
    workers = clue.config.trainer.dataloader_num_workers
    cards = clue.facts.device == "cuda" and clue.facts.num_processes > 1
    if not workers and not cards:
        return [
            "nothing of this run needs /dev/shm: see whether the files of model and data are whole, and df -h"
        ]
    ways = ["docker run --ipc=host, or --shm-size=16g (docker gives 64 MB unless it is told)"]
    if workers:
        ways.insert(0, f"trainer.dataloader_num_workers=0 (now {workers})")
    if cards:
        ways.append("NCCL_SHM_DISABLE=1 in the environment, where it cannot be made larger")
    return ways


def more_room(clue: Clue) -> list[str]:
    if is_full(SHARED_MEMORY):
        return smaller_shared_memory(clue)
    keep = clue.config.checkpoint.keep
    fewer = [f"checkpoint.keep=1 (now {keep})"] if keep > 1 else []
    where = "output_dir, FINETUNE_CACHE, HF_HOME and TMPDIR say where the run writes"
    return [f"free space, or take a larger disk: {where}", *fewer]


NCCL_WAYS = (
    (r"shared memory|/dev/shm|\bshm\b", "NCCL_SHM_DISABLE=1 (or a larger /dev/shm: see df -h /dev/shm)"),
    (r"peer access|\bP2P\b|cudaIpc|CUDA IPC", "NCCL_P2P_DISABLE=1 (cards that cannot copy to each other)"),
    (r"ibv_|NET/IB|mlx5|InfiniBand|\bgid\b", "NCCL_IB_DISABLE=1 (the network card's RDMA does not work)"),
    (
        r"socket|connect|bootstrap|interface|recv|Broken pipe",
        "NCCL_SOCKET_IFNAME=eth0 (the interface that the machines reach each other by)",
    ),
)
"""What NCCL speaks of, and the variable that goes round it."""


def nccl_ways(clue: Clue) -> list[str]:
    """What fits NCCL's own words; without any, the ways of one machine or of several."""
    said = "\n".join(nccl_words(clue))
    ways = [way for words, way in NCCL_WAYS if re.search(words, said, re.IGNORECASE)]
    several = clue.config.launch.num_machines > 1
    own = [way for _, way in NCCL_WAYS[:2]] if not several else [way for _, way in NCCL_WAYS[2:]]
    return [
        "NCCL_DEBUG=INFO in the environment makes it say more; try one of these beside it",
        *(ways or own),
    ][:MOST]


def after_a_timeout(clue: Clue) -> list[str]:
    limit = f"trainer.ddp_timeout={int(clue.config.trainer.ddp_timeout) * 4}, if a step may last that long"
    return [f"look at the log of the rank that is behind; {limit}", *nccl_ways(clue)][:MOST]


def after_a_loss(clue: Clue) -> list[str]:
    return [
        "see what the launcher and dmesg say of that process (killed, crashed), then start again with "
        "checkpoint.resume=auto if there is a checkpoint"
    ]


def _lighter_strategies(clue: Clue) -> list[str]:
    """Planned strategies that hold less on a card and fit, the fastest first."""
    chosen = chosen_option(clue.run_dir)
    if chosen is None or clue.facts.device == "cpu":
        return []
    now = chosen["gpu"]["needed"]
    options = [
        o for o in read_plan(clue.run_dir)["strategies"] if o["fits"] and o["gpu"]["needed"] < 0.95 * now
    ]
    options.sort(key=lambda option: option["step_seconds"])
    return [
        f"distributed={option['strategy']} ({option['gpu']['needed'] / 1e9:,.1f} GB of a card planned, "
        f"now {now / 1e9:,.1f})"
        for option in options[:1]
    ]


def _mib(pattern: str, clue: Clue) -> float:
    found = re.search(pattern, clue.text)
    return float(found[1]) * {"KiB": 2**-10, "MiB": 1.0, "GiB": 2**10}[found[2]] if found else 0.0
