"""Renders a strategy in accelerate's and the Trainer's words: the only module that knows their names.

The same facts are written twice, for two readers: `launch_file` for `accelerate launch`, which starts the
processes, and `trainer_arguments` for the worker, which builds the strategy from the run's own config and
never from the environment that a launcher left behind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from finetune.config.rules import RunFacts
from finetune.config.schema import DistributedConfig, LaunchConfig, Strategy
from finetune.config.strategy import TRAITS, Engine, Traits

MIXED_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def launch_file(facts: RunFacts, launch: LaunchConfig, distributed: DistributedConfig) -> dict[str, Any]:
    """The accelerate config of a run, as `accelerate launch --config_file` takes it."""
    traits = TRAITS[facts.strategy]
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": traits.launches_with,
        "mixed_precision": MIXED_PRECISION[facts.precision],
        "num_machines": launch.num_machines,
        "machine_rank": launch.machine_rank,
        "num_processes": facts.num_processes,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": facts.device == "cpu",
    }
    if launch.num_machines > 1:
        content["main_process_ip"] = launch.main_process_ip
        content["main_process_port"] = launch.main_process_port or 29500
    if traits.engine is Engine.fsdp2:
        content["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": distributed.reshard_after_forward,
            "fsdp_offload_params": bool(traits.offloads),
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False,
        }
    if traits.engine is Engine.deepspeed:
        content["deepspeed_config"] = {
            "zero_stage": traits.zero_stage,
            "offload_optimizer_device": "cpu" if "optimizer" in traits.offloads else "none",
            "offload_param_device": "cpu" if "weights" in traits.offloads else "none",
            "zero3_init_flag": traits.zero_stage == 3,
            "zero3_save_16bit_model": False,
            "deepspeed_multinode_launcher": "standard",
        }
    return content


def write_launch_file(path: Path, content: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def trainer_arguments(strategy: Strategy, distributed: DistributedConfig) -> dict[str, Any]:
    """The strategy as fields of `TrainingArguments`: `fsdp` and `fsdp_config`, or `deepspeed`."""
    traits = TRAITS[strategy]
    if traits.engine is Engine.fsdp2:
        return {
            "fsdp": True,
            "fsdp_config": {
                "version": 2,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "reshard_after_forward": distributed.reshard_after_forward,
                "cpu_offload": bool(traits.offloads),
                "state_dict_type": "SHARDED_STATE_DICT",
                "cpu_ram_efficient_loading": False,
            },
        }
    if traits.engine is Engine.deepspeed:
        return {"deepspeed": _deepspeed(traits)}
    return {}


def _deepspeed(traits: Traits) -> dict[str, Any]:
    """DeepSpeed's own config. Every number that `trainer` owns is `auto`: one owner, nothing to disagree."""
    zero: dict[str, Any] = {
        "stage": traits.zero_stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if "optimizer" in traits.offloads:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if traits.zero_stage == 3:
        zero |= {
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": False,
        }
        if "weights" in traits.offloads:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # with offload accelerate would put DeepSpeedCPUAdam in place of the optimizer that was asked for
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
    }
