"""The Trainer of a run: TRL's SFTTrainer with our rows, our numbers, and no way to go on from a wrong one."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from torch.utils.data import DataLoader

from finetune.data.windows import WindowSampler
from finetune.errors import RunFailed
from finetune.planner.forecast import BACKWARD, BETWEEN, FORWARD, STEP
from finetune.training.gauges import Gauges, OwnTime, flops_share
from finetune.training.peaks import Peaks
from finetune.training.rows import (
    IGNORED,
    PreparedRows,
    RowLoader,
    document_tokens,
    row_lengths,
    supervised_counts,
)
from finetune.training.saving_trainer import SavingTrainer

FP16_OVERFLOWS = 40
"""Overflows in a row while the loss scale is halved from its start of 65536 (each norm is seen twice)."""

FIXED_LENGTH = 512
"""Tokens of a document that two models are compared on."""


class RunTrainer(SavingTrainer):
    """SFTTrainer on prepared rows.

    - `get_train_dataloader`: rows by `WindowSampler`; accelerate's sharding repeats rows at an epoch's end.
    - `training_step`: a loss that is not finite ends the run; upstream logs NaN as 0 and exits with 0.
    - `evaluate`: loss over all supervised tokens, the same for any batch size and number of processes.
    - `log`: tokens per second, supervised tokens and the gauges of all ranks beside the loss. Checkpoints are
      part of the steps' time, evaluations are not.
    - `peaks`: the memory of each phase.
    """

    def __init__(self, *args: Any, train_dataset: Dataset, **kwargs: Any) -> None:
        super().__init__(*args, train_dataset=train_dataset, **kwargs)
        # TRL casts the adapter of a quantised model to bfloat16; trained weights are float32 here
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.dtype is torch.bfloat16 and self._is_quantised():
                parameter.data = parameter.data.float()
            if parameter.requires_grad and not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()  # as it lies in checkpoints
        self.sampler = self._window_sampler(
            train_dataset, self.args.per_device_train_batch_size, shuffle=True
        )
        self.row_lengths = row_lengths(train_dataset)
        self.row_supervised = supervised_counts(train_dataset)
        self.document_tokens = document_tokens(train_dataset)
        self.seen_tokens = 0
        self.seen_supervised = 0
        self.highest_rate = 0.0
        self.peaks = Peaks(self.args.device.type)
        self.micro_batch_tokens = 0
        """The most tokens of one forward pass."""
        self.forecast: dict[str, Any] | None = None
        """What plan.json says; None: nothing was planned."""
        self.gauges = Gauges(self.args.device)
        self.own_time = OwnTime(self.model, self.args.device, compiled=self.args.torch_compile)
        self.ranks: dict[str, Any] = {}
        """What the gauges said at the last step that was logged."""
        self._step_started = time.perf_counter()
        self._logged_tokens = self._logged_step = 0
        self._overflows = 0

    def get_train_dataloader(self) -> DataLoader[dict[str, Any]]:
        return self._row_loader(self.train_dataset, self.sampler)

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.peaks.end(BETWEEN)
        self.micro_batch_tokens = max(self.micro_batch_tokens, inputs["input_ids"].numel())
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.peaks.end(FORWARD)
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.peaks.end(BACKWARD)
        if not torch.isfinite(loss):
            raise self._not_finite("loss", loss.item())
        return loss

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        return self._finite_norm(super()._clip_grad_norm(model))

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        return self._finite_norm(super()._get_grad_norm(model, grad_norm=grad_norm))

    def evaluate(
        self,
        eval_dataset: Dataset | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Mean loss over every supervised token of the evaluation rows; logits are never kept."""
        started, was_training = time.perf_counter(), self.model.training
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        sampler = self._window_sampler(
            dataset, self.args.per_device_eval_batch_size, shuffle=False, accumulation=1
        )
        self.model.eval()
        totals = torch.zeros(2, dtype=torch.float64)
        for batch in self._row_loader(dataset, sampler):
            totals += torch.tensor(self.summed_loss(batch), dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(totals)
        loss = float(totals[0] / totals[1])
        metrics = {
            f"{metric_key_prefix}_loss": loss,
            f"{metric_key_prefix}_supervised_tokens": int(totals[1]),
            f"{metric_key_prefix}_runtime": time.perf_counter() - started,
        }
        self._metrics["eval"].clear()
        self.log(metrics)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.model.train(was_training)
        self._step_started += time.perf_counter() - started  # no step's time
        return metrics

    def summed_loss(self, batch: dict[str, Any]) -> tuple[float, int]:
        """Summed negative log-likelihood of a batch's supervised tokens, and their number; no gradients."""
        inputs = self._prepare_inputs(dict(batch))
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = self.model_wrapped(**inputs, use_cache=False, fused_lm_head=True)
        return -outputs.log_probs.double().sum().item(), int(outputs.label_mask.sum().item())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs |= self._speed()
        super().log(logs, start_time)

    def count_steps_before(self, step: int) -> None:
        """Set the counters to where a run stands that goes on behind this step."""
        rates = [entry["learning_rate"] for entry in self.state.log_history if "learning_rate" in entry]
        self.highest_rate = max(rates, default=0.0)
        for done in range(step):
            self._count(done)
        self._logged_tokens, self._logged_step = self.seen_tokens, step

    def start_clock(self) -> None:
        """The first step begins: what came before it is none of its time."""
        self._step_started = time.perf_counter()
        self.own_time.since_last()

    def count_step(self) -> None:
        """Add the rows of the optimizer step that just ended to the counters."""
        self.peaks.end(STEP)
        self._count(self.state.global_step - 1)

    def _count(self, step: int) -> None:
        rows = self.sampler.window(step)
        self.seen_tokens += int(self.row_lengths[rows].sum())
        self.seen_supervised += int(self.row_supervised[rows].sum())

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """No card: TRL would write one into the folder of checkpoints at every save."""

    def _send_telemetry(self) -> None:
        """None: a run tells nobody that it runs."""

    def rows_of_step(self, step: int) -> list[int]:
        """This rank's row numbers, in the file's order of rows, for an optimizer step counted from 0."""
        documents = self.train_dataset.select(self.sampler.rank_rows(step))["row"]
        return sorted(row for packed in documents for row in packed)

    def _speed(self) -> dict[str, float]:
        now = time.perf_counter()
        tokens, seconds = self.seen_tokens - self._logged_tokens, now - self._step_started
        self._step_started, self._logged_tokens = now, self.seen_tokens
        speed: dict[str, float] = {"supervised_tokens": self.seen_supervised, "tokens": self.seen_tokens}
        if tokens:
            speed["tokens_per_second"] = tokens / seconds
            share = flops_share(self.forecast, tokens / seconds, self.document_tokens, self.args.world_size)
            speed |= {"mfu": share} if share is not None else {}
        steps, self._logged_step = self.state.global_step - self._logged_step, self.state.global_step
        self.ranks = self.gauges.read(self.own_time.since_last() / max(steps, 1), self.peaks.latest())
        return speed

    def _window_sampler(
        self, dataset: Dataset, per_device: int, *, shuffle: bool, accumulation: int | None = None
    ) -> WindowSampler:
        return WindowSampler(
            row_lengths(dataset),
            per_device=per_device,
            accumulation=accumulation or self.args.gradient_accumulation_steps,
            rank=self.args.process_index,
            world_size=self.args.world_size,
            seed=self.args.seed,
            shuffle=shuffle,
        )

    def _row_loader(self, dataset: Dataset, sampler: WindowSampler) -> RowLoader:
        rows = PreparedRows(dataset, filler_token=self.processing_class.pad_token_id)
        workers = self.args.dataloader_num_workers
        return RowLoader(
            rows,
            waits=self.own_time if sampler is self.sampler else None,
            batch_sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
            persistent_workers=self.args.dataloader_persistent_workers and workers > 0,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            multiprocessing_context=self.args.dataloader_multiprocessing_context,
        )

    def _finite_norm(self, norm: Any) -> Any:
        """A norm that is not finite ends the run; in fp16 when lowering the loss scale does not help."""
        if norm is None or np.isfinite(float(norm)):
            self._overflows = 0
            return norm
        self._overflows += 1
        if not self.args.fp16 or self._overflows > FP16_OVERFLOWS:
            raise self._not_finite("gradient norm", float(norm))
        return norm

    def _not_finite(self, what: str, value: float) -> RunFailed:
        step = self.state.global_step
        rows = self.rows_of_step(step)
        ways = " or set trainer.max_grad_norm"
        if self.args.fp16:
            ways = ", set trainer.max_grad_norm,\n  or use bf16 or fp32 instead of fp16"
        shown = ", ".join(map(str, rows[:20])) + (f" and {len(rows) - 20} more" if len(rows) > 20 else "")
        return RunFailed(
            f"step {step + 1}: the {what} is {value} on rank {self.args.process_index}.\n"
            f"  Rows of this step on this rank (counted from 0): {shown}.\n"
            f"  Look at these rows; else lower trainer.learning_rate{ways}."
        )

    def _is_quantised(self) -> bool:
        return "quantization_config" in self.model.config.to_dict()


def fixed_batch(dataset: Dataset, pad_token_id: int, rows: int = 4) -> dict[str, torch.Tensor]:
    """The first supervised documents as one padded batch, to compare two models on.

    Packed rows are taken apart again: the reopened model is loaded plainly and knows no packing. Of a long
    document the part around its first supervised token is enough, and its logits fit everywhere.
    """
    documents: list[tuple[list[int], list[int]]] = []
    for row in dataset.select(range(min(rows, len(dataset)))):
        start = 0
        for length in row["seq_lengths"]:
            ids, labels = (row[column][start : start + length] for column in ("input_ids", "labels"))
            start += length
            first = next((at for at, label in enumerate(labels) if at and label != IGNORED), None)
            if first is not None:
                part = slice(max(0, first - FIXED_LENGTH // 2), first + FIXED_LENGTH // 2)
                documents.append((ids[part], labels[part]))
    documents = documents[:rows]
    longest = max(len(ids) for ids, _ in documents)

    def padded(value: int, part: int) -> torch.Tensor:
        return torch.tensor([d[part] + [value] * (longest - len(d[part])) for d in documents])

    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in documents])
    return {"input_ids": padded(pad_token_id, 0), "attention_mask": mask, "labels": padded(IGNORED, 1)}
