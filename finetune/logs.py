"""What reaches the terminal: our own lines on rank 0, warnings that matter, and no library noise."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from finetune.progress import clearing, current
from finetune.secrets import masked

LIBRARIES = ("transformers", "trl", "accelerate", "peft", "bitsandbytes", "deepspeed", "DeepSpeed", "torch")
NOISE = (
    # printed on every CPU run without the optional `kernels` package; the slower path gives the same numbers
    "Failed to load CPU gemm_4bit_forward",
    # the reopened model is compared with the live one, tied weights included
    "tied layer is part of the adapter",
    # packing is ours, and each document is attended by itself
    "Padding-free training is enabled, but the attention implementation",
    "You are using a per_device_train_batch_size of 1 with padding-free",
    # our FSDP settings are rendered, and checkpointing is chosen in `trainer`
    "When using FSDP, prefer `fsdp_config",
    "FSDP upcast of low precision parameters",
    # the tokenizer's special tokens are copied to the model on purpose
    "The tokenizer has new PAD/BOS/EOS tokens",
    # deepspeed, wherever it is imported on a CPU
    "Setting accelerator to CPU",
    # one process in a world of its own
    "torch.distributed process group is initialized, but parallel_mode",
    # accumulation is the Trainer's, and DeepSpeed is told the same number
    "Gradient accumulation steps mismatch",
    # gloo has no devices
    "No device id is provided via `init_process_group`",
    "barrier(): using the device under current context",
)
"""Library messages that tell a user nothing to act on, each with the reason."""


def set_up_logging(main: bool) -> None:
    """Send our own log to stdout (rank 0) and silence `NOISE`; `FINETUNE_DEBUG` shows everything."""
    debug = "FINETUNE_DEBUG" in os.environ
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Masked("%(message)s"))
    ours = logging.getLogger("finetune")
    ours.handlers, ours.propagate = [handler], False
    ours.setLevel(logging.DEBUG if debug else logging.INFO if main else logging.WARNING)
    if debug:
        return
    for one in _noisy():
        one.addFilter(_is_no_noise)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    from transformers.utils.logging import disable_progress_bar, set_tqdm_hook

    disable_progress_bar()
    set_tqdm_hook(_loading)
    _ignore_warnings()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@contextmanager
def without_noise() -> Iterator[None]:
    """Silence `NOISE` for a while, in a process that is somebody else's."""
    if "FINETUNE_DEBUG" in os.environ:
        yield
        return
    from transformers.utils.logging import set_tqdm_hook

    loud = [one for one in _noisy() if _is_no_noise not in one.filters]
    before = set_tqdm_hook(_unseen)
    with warnings.catch_warnings():
        _ignore_warnings()
        for one in loud:
            one.addFilter(_is_no_noise)
        try:
            yield
        finally:
            set_tqdm_hook(before)
            for one in loud:
                one.removeFilter(_is_no_noise)


def _noisy() -> list[logging.Filterer]:
    """What library messages pass through."""
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    last = [logging.lastResort] if logging.lastResort is not None else []
    return [*loggers, *(handler for logger in loggers for handler in logger.handlers), *last]


def _ignore_warnings() -> None:
    for start in NOISE:
        warnings.filterwarnings("ignore", message=f".*{start[:40].replace('(', '.').replace(')', '.')}")
    warnings.filterwarnings("ignore", category=FutureWarning)


def _loading(factory: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Weights that transformers reads or writes advance the stage that goes on."""
    going = current()
    counts = args and going is not None and not going.unit  # one with a unit counts something else
    return going.over(args[0]) if counts and going is not None else factory(*args, **options)


def _unseen(factory: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Weights are read without a bar; what is fetched keeps its own."""
    return args[0] if args else factory(*args, **options)


class _Masked(logging.Formatter):
    """In a world that another launcher made our lines go to its terminal, through nothing else of ours."""

    def format(self, record: logging.LogRecord) -> str:
        return clearing() + masked(super().format(record))


def _is_no_noise(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(noise in message for noise in NOISE)
