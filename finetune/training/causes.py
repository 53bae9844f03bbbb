"""The causes that a run is known to die of: what gives each away, what is told of it, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from finetune.training.figures import (
    Clue,
    disks,
    gpu_memory,
    host_memory,
    kernel_kills,
    last_words,
    matching_lines,
    nccl_words,
    shared_memory,
    waiting_ranks,
)
from finetune.training.remedies import (
    after_a_kill,
    after_a_loss,
    after_a_timeout,
    less_gpu_memory,
    less_host_memory,
    more_room,
    nccl_ways,
    smaller_shared_memory,
)

Lines = Callable[[Clue], list[str]]
UNWRITTEN = "unwritten"
"""A process could not even write down why it failed, and the disk of the run is full."""


class Level(IntEnum):
    """What comes first when several causes match."""

    cause = 0
    talking = 1
    """Processes could not talk to each other: that is the cause, or one of them had died before."""
    consequence = 2
    """A process lost another one, which has the cause."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One row of the table."""

    name: str
    words: str
    """A pattern that failed processes say it in."""
    told: str
    """One sentence; `{who}` is the rank."""
    advice: Lines
    figures: Lines = lambda clue: []
    sign: str = ""
    """How a process ended that could not say the words: by a signal, or `UNWRITTEN`."""
    level: Level = Level.cause
    adds_to_ours: bool = False
    """Is told above a message of our own too: it has figures that the message lacks."""

    def matches(self, text: str) -> bool:
        return re.search(self.words, text, re.MULTILINE) is not None


def advise(*lines: str) -> Lines:
    return lambda clue: list(lines)


CHANGE_MACHINE = "have the provider replace the machine or the card; go on with checkpoint.resume=auto there"

CAUSES = (
    Cause(
        name="gpu_memory",
        words=r"CUDA out of memory|CUDA error: out of memory|Cuda failure( 2)? '?out of memory"
        r"|CUBLAS_STATUS_ALLOC_FAILED|CUDA_ERROR_OUT_OF_MEMORY",
        told="{who} ran out of GPU memory",
        figures=gpu_memory,
        advice=less_gpu_memory,
    ),
    Cause(
        name="gpu_fault",
        words=r"uncorrectable ECC error|uncorrectable NVLink error|NVRM: Xid|GPU is lost|fallen off the bus",
        told="{who}: its card has failed (a hardware fault, which no setting cures)",
        figures=matching_lines(r"uncorrectable|Xid|lost|fallen off"),
        advice=advise("nvidia-smi -q -d ECC,ROW_REMAPPER and dmesg | grep -i xid show it", CHANGE_MACHINE),
    ),
    Cause(
        name="gpu_fabric",
        words=r"[Ss]ystem not yet initialized",
        told="{who}: CUDA error 802, the fabric that joins the cards (NVSwitch) is not initialised",
        figures=matching_lines(r"[Ss]ystem not yet initialized"),
        advice=advise(
            "nvidia-smi -q | grep -A 2 Fabric must say Completed; nvidia-fabricmanager has to run on the "
            "host, in the driver's version",
            CHANGE_MACHINE,
        ),
        adds_to_ours=True,
    ),
    Cause(
        name="gpu_driver",
        words=r"NVIDIA driver on your system is too old|CUDA driver version is insufficient"
        r"|forward compatibility was attempted on non supported HW",
        told="{who}: the NVIDIA driver is older than the CUDA that torch was built for",
        figures=matching_lines(
            r"driver on your system is too old|driver version is insufficient|forward compat"
        ),
        advice=advise(
            "a machine with a newer driver, or a torch built for this driver's CUDA (nvidia-smi shows it "
            "in its first lines); older ones: https://pytorch.org/get-started/previous-versions"
        ),
        adds_to_ours=True,
    ),
    Cause(
        name="gpu_kernels",
        words=r"no kernel image is available for execution on the device",
        told="{who}: a library holds no code for this card",
        figures=matching_lines(r"CUDA capability sm_|CUDA capabilities sm_|supports CUDA capabilit"),
        advice=advise(
            "python -c 'import torch; print(torch.cuda.get_arch_list(), torch.cuda.get_device_capability())' "
            "must show the card's; install a build that has it (the traceback shows which library it is)"
        ),
        adds_to_ours=True,
    ),
    Cause(
        name="gpu_assert",
        words=r"device-side assert triggered",
        told="{who}: a check inside a GPU kernel failed, most often an index outside its table",
        figures=matching_lines(r"Assertion .* failed"),
        advice=advise(
            "CUDA_LAUNCH_BLOCKING=1 in the environment: the traceback then shows the line that did it",
            "the same run with launch.device=cpu and a few rows names the index",
        ),
    ),
    Cause(
        name="gpu_access",
        words=r"an illegal memory access was encountered|misaligned address|unspecified launch failure"
        r"|an illegal instruction was encountered",
        told="{who}: a GPU kernel touched memory that is not its own (a fault of a library, or of the card)",
        figures=matching_lines(r"CUDA error: "),
        advice=advise(
            "CUDA_LAUNCH_BLOCKING=1 in the environment: the traceback then shows the line that did it",
            "model.attn_implementation=sdpa and the default optimizer leave extra kernels out; if it comes "
            "at other places each time, suspect the card (dmesg | grep -i xid)",
        ),
    ),
    Cause(
        name="shared_memory",
        words=r"[Bb]us error|insufficient shared memory|out of shared memory|allocate shared memory\(shm\)"
        r"|unable to (open shared memory object|write to file) </torch_|(segment|allocate) .*/dev/shm/nccl",
        sign="SIGBUS",
        told="{who}: bus error or no room in shared memory: what an address stands for could not be had",
        figures=shared_memory,
        advice=smaller_shared_memory,
    ),
    Cause(
        name="disk_full",
        words=r"No space left on device|Disk quota exceeded|disk is full|\d+ requested and \d+ written",
        sign=UNWRITTEN,
        told="{who}: a disk is full",
        figures=disks,
        advice=more_room,
        adds_to_ours=True,
    ),
    Cause(
        name="host_memory",
        words=r"^(?:\w+\.)*(?:MemoryError|_ArrayMemoryError|ArrowMemoryError)\b"
        r"|DefaultCPUAllocator: (?:can't|not enough)|std::bad_alloc|Cannot allocate memory",
        told="{who} ran out of the host's memory (RAM)",
        figures=host_memory,
        advice=less_host_memory,
    ),
    Cause(
        name="killed",
        words=r"killed by signal: Killed",
        sign="SIGKILL",
        told="{who} was killed by SIGKILL",
        figures=kernel_kills,
        advice=after_a_kill,
    ),
    Cause(
        name="port_in_use",
        words=r"EADDRINUSE|(?i:address already in use)|errno: 98\b",
        told="{who}: the port that the processes meet at is in use",
        figures=matching_lines(r"EADDRINUSE|(?i:address already in use)|errno: 98\b"),
        advice=advise(
            "leave launch.main_process_port out (a free one is chosen), or set another one; under another "
            "launcher: torchrun --master_port, or --standalone; accelerate launch --main_process_port 0",
            "ss -ltnp | grep PORT shows who has it: often a run that has not ended",
        ),
    ),
    Cause(
        name="hub_access",
        words=r"GatedRepoError|Cannot access gated repo|\b40[13] Client Error|Invalid username or password",
        told="{who}: the hub refuses a file (no login, or this login has no access)",
        figures=matching_lines(r"Access to \w+ .* is restricted", r"gated repo", r"40[13] Client Error"),
        advice=advise(
            "ask for access on the model's page, then HF_TOKEN=... in the environment, or hf auth login"
        ),
    ),
    Cause(
        name="illegal_instruction",
        words=r"killed by signal: Illegal instruction",
        sign="SIGILL",
        told="{who}: illegal instruction (SIGILL), a library was built for another CPU",
        advice=advise(
            "install the library anew on this machine; ops that were compiled elsewhere lie in "
            "~/.cache/torch_extensions and ~/.triton: remove them"
        ),
    ),
    Cause(
        name="crashed",
        words=r"killed by signal: Segmentation fault",
        sign="SIGSEGV",
        told="{who} crashed outside Python (SIGSEGV: a fault of a library)",
        advice=advise("PYTHONFAULTHANDLER=1 in the environment: the log then shows in which call"),
    ),
    Cause(
        name="nccl_timeout",
        words=r"Watchdog caught collective operation timeout|Some NCCL operations have failed or timed out",
        told="{who} waited in vain for another rank (NCCL time-out)",
        figures=lambda clue: [*waiting_ranks(clue), *nccl_words(clue)],
        advice=after_a_timeout,
        level=Level.talking,
    ),
    Cause(
        name="gloo_timeout",
        words=r"Timed out waiting \d+ms for (?:recv|send) operation",
        told="{who} waited in vain for another rank (gloo time-out)",
        figures=matching_lines(r"Timed out waiting \d+ms"),
        advice=lambda clue: after_a_timeout(clue)[:1],
        level=Level.talking,
    ),
    Cause(
        name="lost_process",
        words=r"ncclRemoteError|Connection closed by (?:remote )?peer|Connection reset by peer"
        r"|Connection was likely closed|Broken pipe|remote process exited or there was a network error",
        told="{who} lost the connection to another process",
        figures=last_words,
        advice=after_a_loss,
        level=Level.consequence,
    ),
    Cause(
        name="nccl_error",
        words=r"NCCL error in|nccl(?:System|UnhandledCuda|Internal)Error|ncclInvalid\w+",
        told="{who}: NCCL, which joins the cards, has failed",
        figures=nccl_words,
        advice=nccl_ways,
        level=Level.talking,
    ),
)
"""In the order in which they are looked for in one process's words: the more special ones first."""
