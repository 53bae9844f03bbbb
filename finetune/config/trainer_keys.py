"""Fields of `trl.SFTConfig` that are not set under `trainer`: the key to use instead, or the reason."""

from __future__ import annotations

ALIASES = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
"""Old name: the name transformers uses now. The old one is accepted."""

_ORDER = "the order of the rows comes from `seed` alone, and it is the same for any number of processes"
_CHECKPOINTS = "use checkpoint.every_minutes or checkpoint.every_steps"
_RESUME = "use checkpoint.resume=auto (or the path of a checkpoint), which takes up everything"
_BEST = "use checkpoint.best=eval_loss: the best checkpoint stays, and model/ holds its weights"
_HUB = "a run pushes nothing: use `merge RUN --push hub://OWNER/NAME`, or `hf upload` on its model/ folder"
_STRATEGY = "use distributed=NAME; its settings are rendered from the strategy"
_LOSS_ON = "use data.loss_on (assistant, last_assistant, completion or all)"
_LOSS_ONLY = "evaluation computes the loss alone, so nothing would read it"
_CAST_EVAL = (
    "it has no effect on evaluation during training; precision is set by trainer.bf16 and trainer.fp16"
)
_VERB = "the verb decides what is run"

OWNED_ELSEWHERE: dict[str, str] = {
    "output_dir": "use output_dir (top level): the folder of all runs",
    "run_name": "use run_name (top level)",
    "seed": "use seed (top level)",
    "data_seed": f"use seed (top level): {_ORDER}",
    # data
    "max_length": "use data.max_length",
    "truncation_mode": "use data.too_long (drop, truncate or error)",
    "packing": "use data.packing",
    "packing_strategy": "use data.packing_strategy",
    "eval_packing": "use data.packing",
    "padding_free": "use data.packing: packed rows are trained without padding",
    "completion_only_loss": _LOSS_ON,
    "assistant_only_loss": _LOSS_ON,
    "dataset_text_field": "use columns of the source: data.train='[{path: FILE, columns: {text: COLUMN}}]'",
    "dataset_kwargs": "the data is prepared before the trainer exists; use the keys of data",
    "dataset_num_proc": "use data.num_proc",
    "shuffle_dataset": f"{_ORDER}",
    "train_sampling_strategy": f"{_ORDER}",
    "length_column_name": f"it serves group_by_length; {_ORDER}",
    "dataloader_drop_last": "no row is dropped: an epoch's last batch is filled with rows that teach nothing",
    "dataloader_in_order": f"{_ORDER}",
    "remove_unused_columns": "prepared rows hold only what training needs",
    "label_names": "prepared rows hold only what training needs",
    # model
    "model_init_kwargs": "use the keys of model (dtype, revision, attn_implementation, ...)",
    "trust_remote_code": "use model.trust_remote_code",
    "chat_template_path": "use model.chat_template",
    "eos_token": "the end of a turn comes from the chat template: use model.chat_template",
    "pad_token": "the padding token is chosen with the tokenizer, and no token is learnt because of it",
    # checkpoints
    "save_strategy": _CHECKPOINTS,
    "save_steps": _CHECKPOINTS,
    "save_total_limit": "use checkpoint.keep",
    "save_only_model": "every checkpoint can be resumed, and the model is saved apart in model/",
    "save_on_each_node": "the run folder is on storage that all machines share",
    "enable_jit_checkpoint": "a signal always writes a checkpoint before the run ends",
    "resume_from_checkpoint": _RESUME,
    "ignore_data_skip": _RESUME,
    "restore_callback_states_from_checkpoint": _RESUME,
    "load_best_model_at_end": _BEST,
    "metric_for_best_model": _BEST,
    "greater_is_better": _BEST,
    "push_to_hub": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_private_repo": _HUB,
    "hub_revision": _HUB,
    "hub_token": "tokens come from the environment (HF_TOKEN) or `hf auth login`",
    # tracking
    "report_to": "use tracking=NAME (none, tensorboard, wandb, mlflow, trackio)",
    # launch and distributed
    "use_cpu": "use launch.device=cpu",
    "local_rank": "the launcher numbers the processes",
    "ddp_backend": "use launch.device: nccl on GPUs, gloo on CPU",
    "fsdp": _STRATEGY,
    "fsdp_config": _STRATEGY,
    "deepspeed": _STRATEGY,
    "parallelism_config": _STRATEGY,
    "accelerator_config": f"batches are made by the run's own sampler: {_ORDER}",
    "auto_find_batch_size": "it would change the global batch during the run; lower "
    "trainer.per_device_train_batch_size (with trainer.global_batch_size accumulation makes up for it)",
    # no effect here
    "do_train": _VERB,
    "do_eval": _VERB,
    "do_predict": _VERB,
    "disable_tqdm": "each logged step is a line; use trainer.logging_steps",
    "logging_nan_inf_filter": "a loss that is not finite always stops the run",
    "prediction_loss_only": _LOSS_ONLY,
    "include_for_metrics": _LOSS_ONLY,
    "batch_eval_metrics": _LOSS_ONLY,
    "eval_do_concat_batches": _LOSS_ONLY,
    "eval_use_gather_object": _LOSS_ONLY,
    "eval_accumulation_steps": _LOSS_ONLY,
    "bf16_full_eval": _CAST_EVAL,
    "fp16_full_eval": _CAST_EVAL,
}
"""Field of `SFTConfig` -> what to do instead of setting it under `trainer`."""
