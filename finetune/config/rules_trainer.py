"""Rules on optimizer, schedule, evaluation, data and tracking."""

from __future__ import annotations

import re
from pathlib import Path

from finetune.config.batch import Batch
from finetune.config.case import FSDP, Case
from finetune.config.packages import TRACKER_PACKAGES, bitsandbytes_problem, installed, optimizer_package
from finetune.config.schema import Format, SourceConfig, Strategy, Tracker
from finetune.config.suggest import nearest
from finetune.config.trainer_fields import trainer_fields
from finetune.config.values import written

NEEDS_EVALUATION = ("reduce_lr_on_plateau", "greedy")
"""Schedules that follow the evaluation loss."""

OWN_FORMAT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def check_trainer(case: Case, batch: Batch) -> None:
    """Everything under `trainer` that depends on something else."""
    _optimizer(case, batch)
    _duration(case)
    _no_effect(case)
    _device(case)
    trainer = case.config.trainer
    if trainer.dataloader_num_workers == 0:
        for key in ("dataloader_persistent_workers", "dataloader_prefetch_factor"):
            if getattr(trainer, key):
                why = "it needs trainer.dataloader_num_workers above 0"
                case.refuse(f"trainer.{key}={written(getattr(trainer, key))}", why)
    if trainer.loss_type == "dft" and trainer.label_smoothing_factor:
        why = "the dft loss knows no label smoothing"
        case.refuse(
            f"trainer.label_smoothing_factor={trainer.label_smoothing_factor:g}",
            why,
            "Leave one of them out.",
        )
    if trainer.use_liger_kernel and installed("liger-kernel") is None:
        case.lack(
            "trainer.use_liger_kernel=true", "liger-kernel is not installed", "pip install liger-kernel"
        )


def check_data(case: Case) -> None:
    """Files that are not there, and evaluation that has nothing to read."""
    data, trainer, checkpoint = case.config.data, case.config.trainer, case.config.checkpoint
    check_sources(case)
    has_rows = bool(data.eval) or data.eval_fraction > 0
    wants = [
        text
        for text, wanted in (
            (f"trainer.eval_strategy={trainer.eval_strategy}", trainer.eval_strategy != "no"),
            ("trainer.eval_on_start=true", trainer.eval_on_start),
            (f"checkpoint.best={checkpoint.best}", checkpoint.best is not None),
            (
                f"trainer.lr_scheduler_type={trainer.lr_scheduler_type}",
                trainer.lr_scheduler_type in NEEDS_EVALUATION,
            ),
        )
        if wanted
    ]
    if wants and not has_rows:
        fix = "Set data.eval='[{path: FILE}]' or data.eval_fraction=0.05."
        case.refuse(" and ".join(wants), "there are no rows for evaluation", fix)
    if checkpoint.early_stopping_patience is not None and checkpoint.best is None:
        why = "it counts evaluations without a new best, and no best one is kept"
        key = f"checkpoint.early_stopping_patience={checkpoint.early_stopping_patience}"
        case.refuse(key, why, "Set checkpoint.best=eval_loss.")
    if has_rows and trainer.eval_strategy == "no" and checkpoint.best is not None:
        why = "nothing is evaluated while training (trainer.eval_strategy=no)"
        fix = "Set trainer.eval_strategy=steps trainer.eval_steps=N, or epoch."
        case.refuse(f"checkpoint.best={checkpoint.best}", why, fix)
    elif has_rows and trainer.eval_strategy == "no":
        if trainer.lr_scheduler_type in NEEDS_EVALUATION:
            why = "it follows the evaluation loss, and trainer.eval_strategy=no"
            case.refuse(
                f"trainer.lr_scheduler_type={trainer.lr_scheduler_type}",
                why,
                "Set trainer.eval_strategy=steps.",
            )
        else:
            case.notes.append(
                "nothing is evaluated while training (trainer.eval_strategy=no), though there are rows for it"
            )


def check_sources(case: Case) -> None:
    """Files that are not there, formats that are none, and parts of a mixture that do not add up."""
    data = case.config.data
    for name in ("train", "eval"):
        sources: list[SourceConfig] = getattr(data, name)
        for position, source in enumerate(sources):
            key = f"data.{name}.{position}"
            if not source.path.strip():
                case.refuse(
                    f"{key}.path={source.path!r}", "it is empty", "Name a file, a folder or a hub id."
                )
            named = Path(source.path).expanduser()
            if source.path.startswith(("/", "~")) and not set("*?[") & {*source.path} and not named.exists():
                case.lack(f"{key}.path={source.path}", "there is no such file or folder")
            if source.format is not None and not OWN_FORMAT.fullmatch(source.format):
                _format(case, f"{key}.format={source.format}", source.format)
            elif source.format is not None and ":" in source.format and source.columns:
                why = f"{source.format} makes the rows, and gives them the columns it likes"
                case.refuse(f"{key}.columns", why, "Leave the mapping out.")
            if source.weight is not None and not source.weight > 0:
                case.refuse(f"{key}.weight={source.weight:g}", "must be greater than 0")
        weighted = sum(source.weight is not None for source in sources)
        if 0 < weighted < len(sources):
            why = f"{weighted} of {len(sources)} sources have a weight"
            case.refuse(f"data.{name}", why, "Give every source its weight, or none.")
        if data.streaming and name == "train" and weighted == 0 and len(sources) > 1:
            why = f"nothing says in which parts the {len(sources)} sources are read"
            case.refuse(f"data.streaming=true and data.{name}", why, "Give every source its weight.")
    if data.eval and data.eval_fraction:
        why = "both give rows for evaluation"
        case.refuse(f"data.eval and data.eval_fraction={data.eval_fraction:g}", why, "Leave one of them out.")
    if data.streaming and case.config.trainer.max_steps < 1:
        why = "a stream has no known length"
        case.refuse("data.streaming=true", why, "Set trainer.max_steps.")


def _format(case: Case, where: str, given: str) -> None:
    if given in list(Format):
        return
    near = nearest(given, list(Format))
    meant = f"Did you mean {near}? " if near else ""
    known = f"Known: {', '.join(Format)}; or a function of yours, written module:function."
    case.refuse(where, "it is no format", f"{meant}{known}")


def check_tracking(case: Case) -> None:
    """The tracker's package, and keys that only one tracker reads."""
    tracker, trainer = case.config.tracking.report_to, case.config.trainer
    packages = TRACKER_PACKAGES.get(tracker, ())
    if packages and not any(installed(p) is not None for p in packages):
        why = f"needs the package {packages[0]}, which is not installed"
        case.lack(f"tracking={tracker.value}", why, f"Install it: pip install {packages[0]}")
    if tracker is Tracker.trackio:
        return
    for key in ("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"):
        value = getattr(trainer, key)
        if value != trainer_fields()[key].default:
            why = f"only trackio reads it, and tracking={tracker.value}"
            case.refuse(f"trainer.{key}={written(value)}", why, "Use tracking=trackio, or leave the key out.")


def _optimizer(case: Case, batch: Batch) -> None:
    optim, target = case.config.trainer.optim or "", case.config.trainer.optim_target_modules
    where = f"trainer.optim={optim}"
    package = optimizer_package(optim)
    missing = bitsandbytes_problem() if package == "bitsandbytes" else None
    if missing is not None:
        case.lack(where, missing, "Install it: pip install 'bitsandbytes>=0.46.1'; or use adamw_torch_fused.")
    elif package is not None and installed(package) is None:
        case.lack(where, f"needs {package}, which is not installed", f"Install it: pip install {package}")
    if package == "bitsandbytes" and case.strategy in FSDP:
        case.refuse(
            f"{where} with distributed={case.strategy.value}",
            "bitsandbytes optimizers do not know FSDP2's sharded tensors "
            "(https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1633)",
            "Use adamw_torch_fused, or a zero strategy.",
        )
    if optim.startswith(("galore", "apollo")) and target is None:
        case.refuse(
            where, "needs the modules it works on", "Set trainer.optim_target_modules=all-linear, or a list."
        )
    if optim.endswith("layerwise") and (batch.processes > 1 or batch.accumulation > 1):
        why = f"layer-wise updates need one process and no accumulation; this run has {batch.line}"
        case.refuse(where, why, f"Use {optim.removesuffix('_layerwise')}.")


def _duration(case: Case) -> None:
    trainer = case.config.trainer
    if trainer.max_steps > 0 and "trainer.num_train_epochs" in case.given:
        case.notes.append(
            f"trainer.max_steps={trainer.max_steps} ends the run; "
            f"trainer.num_train_epochs={trainer.num_train_epochs:g} is not used"
        )


def _no_effect(case: Case) -> None:
    """Keys of DistributedDataParallel under another strategy."""
    trainer = case.config.trainer
    if case.strategy is Strategy.ddp:
        return
    for key in (name for name in trainer_fields() if name.startswith("ddp_") and name != "ddp_timeout"):
        value = getattr(trainer, key)
        if value is not None:
            why = f"it is a setting of ddp; the strategy is {case.strategy.value}"
            case.refuse(f"trainer.{key}={written(value)}", why, "Use distributed=ddp, or leave the key out.")


def _device(case: Case) -> None:
    if case.config.trainer.tf32 and not (case.device == "cuda" and case.devices.bf16):
        case.refuse(
            "trainer.tf32=true", "needs an NVIDIA GPU of the Ampere generation or newer", "Leave the key out."
        )
