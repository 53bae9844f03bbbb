"""The one place that builds TRL's SFTConfig."""

from __future__ import annotations

from trl import SFTConfig

from finetune.config.rules import RunFacts
from finetune.config.schema import RunConfig, Tracker
from finetune.config.trainer_fields import sft_values
from finetune.distributed.accelerate import trainer_arguments
from finetune.model.attention import Attention
from finetune.paths import RunDir


def sft_arguments(config: RunConfig, facts: RunFacts, run_dir: RunDir, attention: Attention) -> SFTConfig:
    """SFTConfig for this process.

    It must exist before the model is loaded: under ZeRO-3 it is what makes weights load already sharded.
    """
    arguments = SFTConfig(
        **sft_values(config.trainer)
        | {
            "output_dir": str(run_dir.checkpoints),
            "run_name": run_dir.path.name,
            "seed": config.seed,
            "learning_rate": facts.learning_rate,
            "per_device_train_batch_size": facts.batch.per_device,
            "gradient_accumulation_steps": facts.batch.accumulation,
            # weights held in bfloat16 are computed in it without autocast, and without the float32 copies
            # that accelerate makes under FSDP when mixed precision is on
            "bf16": facts.precision == "bf16" and facts.trained_dtype != "bfloat16",
            "fp16": facts.precision == "fp16",
            "use_cpu": facts.device == "cpu",
            "report_to": []
            if config.tracking.report_to is Tracker.none
            else [config.tracking.report_to.value],
            # rows are tokenised, masked and packed before any process starts
            "dataset_kwargs": {"skip_prepare_dataset": True},
            "max_length": None,
            "padding_free": attention.padding_free,
            "disable_tqdm": True,
            # frozen parameters need no gradient; one that is trained and unused is an error, not a search
            # every step
            "ddp_find_unused_parameters": bool(config.trainer.ddp_find_unused_parameters),
            "remove_unused_columns": False,
            # losses that are not finite end the run; upstream's filter would log them as 0
            "logging_nan_inf_filter": False,
            # checkpoints are asked for by callbacks, and by upstream at a new best evaluation
            "save_strategy": "no" if config.checkpoint.best is None else "best",
            "metric_for_best_model": config.checkpoint.best,
            "greater_is_better": False,
        },
        **trainer_arguments(facts.strategy, config.distributed),
    )
    if arguments.n_gpu > 1:
        # several cards in sight of one process: the Trainer would wrap the model in nn.DataParallel
        arguments._n_gpu = 1
    return arguments
