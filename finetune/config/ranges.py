"""Which numbers and words a single key can hold: one row a key."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from math import inf
from typing import Any

from finetune.config.schema import RunConfig
from finetune.config.trainer_fields import AUTO
from finetune.config.values import written
from finetune.errors import Problem

Test = Callable[[Any], bool]

POSITIVE: tuple[Test, str] = (lambda v: v > 0, "greater than 0")
NOT_NEGATIVE: tuple[Test, str] = (lambda v: v >= 0, "0 or greater")
FINITE: tuple[Test, str] = (lambda v: 0 < v < inf, "greater than 0, and finite")
FROM_ZERO: tuple[Test, str] = (lambda v: 0 <= v < inf, "0 or greater, and finite")
SHARE: tuple[Test, str] = (lambda v: 0 <= v <= 1, "between 0 and 1")
BELOW_ONE: tuple[Test, str] = (lambda v: 0 <= v < 1, "at least 0 and below 1")

RANGES: dict[str, tuple[Test, str]] = {
    "seed": (lambda v: 0 <= v < 2**32, "between 0 and 4294967295"),
    "adapter.r": POSITIVE,
    "adapter.lora_alpha": POSITIVE,
    "adapter.lora_dropout": BELOW_ONE,
    "adapter.bits": (lambda v: v in (4, 8), "4 or 8"),
    "adapter.quant_type": (lambda v: v in ("nf4", "fp4"), "nf4 or fp4"),
    "data.eval_fraction": BELOW_ONE,
    "data.eval_samples": NOT_NEGATIVE,
    "data.max_length": POSITIVE,
    "data.max_dropped": SHARE,
    "data.num_proc": POSITIVE,
    "trainer.global_batch_size": POSITIVE,
    "trainer.base_global_batch_size": POSITIVE,
    "trainer.per_device_train_batch_size": POSITIVE,
    "trainer.per_device_eval_batch_size": POSITIVE,
    "trainer.gradient_accumulation_steps": POSITIVE,
    "trainer.num_train_epochs": POSITIVE,
    "trainer.max_steps": (lambda v: v > 0 or v == -1, "greater than 0, or -1 (num_train_epochs decides)"),
    "trainer.learning_rate": POSITIVE,
    "trainer.warmup_steps": NOT_NEGATIVE,
    "trainer.weight_decay": NOT_NEGATIVE,
    "trainer.adam_beta1": BELOW_ONE,
    "trainer.adam_beta2": BELOW_ONE,
    "trainer.adam_epsilon": POSITIVE,
    "trainer.max_grad_norm": NOT_NEGATIVE,
    "trainer.label_smoothing_factor": BELOW_ONE,
    "trainer.logging_steps": POSITIVE,
    "trainer.eval_steps": POSITIVE,
    "trainer.eval_delay": NOT_NEGATIVE,
    "trainer.dataloader_num_workers": NOT_NEGATIVE,
    "trainer.dataloader_prefetch_factor": POSITIVE,
    "trainer.torch_empty_cache_steps": POSITIVE,
    "trainer.ddp_timeout": POSITIVE,
    "trainer.average_tokens_across_devices": (
        lambda v: v is True,
        "true: otherwise the loss depends on how rows are spread over processes",
    ),
    "launch.num_processes": POSITIVE,
    "launch.num_machines": POSITIVE,
    "launch.machine_rank": NOT_NEGATIVE,
    "launch.main_process_port": (lambda v: 0 < v < 65536, "between 1 and 65535"),
    "checkpoint.every_minutes": POSITIVE,
    "checkpoint.every_steps": POSITIVE,
    "checkpoint.keep": POSITIVE,
    "checkpoint.best": (
        lambda v: v == "eval_loss",
        "eval_loss, the only metric that is evaluated while training",
    ),
    "checkpoint.early_stopping_patience": POSITIVE,
    "checkpoint.early_stopping_threshold": NOT_NEGATIVE,
    **{f"hardware.{name}": FINITE for name in ("num_gpus", "host_memory_gb", "memory_mib", "network_gbit_s")},
    **{f"hardware.{name}": FINITE for name in ("matmul_tflops", "memory_gb_s", "link_gb_s")},
    **{f"hardware.{name}": FROM_ZERO for name in ("reserved_mib", "price_per_hour", "minimum_minutes")},
    "plan.margin": BELOW_ONE,
}


def out_of_range(config: RunConfig) -> list[Problem]:
    """Every value that its key cannot hold; null is told apart by the types."""
    found = []
    for key, (test, expected) in RANGES.items():
        value: Any = reduce(getattr, key.split("."), config)
        if value not in (None, AUTO) and not test(value):
            found.append(Problem(f"{key}={written(value)}", f"must be {expected}"))
    for name in ("train", "eval"):
        for position, source in enumerate(getattr(config.data, name)):
            if source.limit is not None and source.limit < 1:
                found.append(
                    Problem(f"data.{name}.{position}.limit={source.limit}", "must be greater than 0")
                )
    return found
