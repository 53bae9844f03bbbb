"""What a config comes to on this machine: every cross-field problem at once, or the numbers of the run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from finetune.config.batch import Batch, resolve_batch, resolve_learning_rate
from finetune.config.case import Case
from finetune.config.devices import Devices
from finetune.config.precision import resolve_precision
from finetune.config.ranges import out_of_range
from finetune.config.rules_launch import (
    check_launch,
    choose_device,
    choose_processes,
    choose_stop,
    choose_strategy,
)
from finetune.config.rules_model import (
    check_adapter,
    check_lengths,
    check_masters,
    check_model,
    effective_positions,
    model_facts,
)
from finetune.config.rules_remote import check_remote
from finetune.config.rules_trainer import check_data, check_sources, check_tracking, check_trainer
from finetune.config.schema import RunConfig, Strategy
from finetune.errors import Problem, Refusal

NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The numbers of a run: worked out once, before anything is loaded, and handed on."""

    requested_strategy: Strategy
    strategy: Strategy
    """Never `auto`."""
    device: str
    """`cuda` or `cpu`."""
    num_processes: int
    """Over all machines."""
    batch: Batch
    precision: str
    """What is computed in: `fp32`, `bf16` or `fp16`."""
    precision_reason: str
    trained_dtype: str
    """torch's name of the dtype of weights that are trained."""
    frozen_dtype: str
    """The same for frozen weights that are not quantised."""
    learning_rate: float
    """After `trainer.scale_learning_rate`."""
    positions: int | None
    """Positions of the model after `model.rope_scaling`; null: not known before it is fetched."""
    notes: tuple[str, ...]
    """What the person should be told."""
    stop_at: float | None = None
    """When the run has to have ended, in seconds since 1970."""

    @property
    def lines(self) -> list[str]:
        """The facts as they are printed."""
        weights = f"trained weights are held in {self.trained_dtype}"
        return [
            self.batch.line,
            f"precision {self.precision} ({self.precision_reason}), {weights}",
            *self.notes,
        ]


def resolve(
    config: RunConfig,
    *,
    devices: Devices,
    world: int | None = None,
    given: Mapping[str, str] = NOTHING,
    problems: Collection[Problem] = (),
    subject: str = "the config",
) -> RunFacts:
    """The facts of the run, or one refusal with all `problems` found before and here.

    `world` is the number of processes that another launcher has started; `given` says where keys were set
    (`Composed.provenance`): one without effect is refused only when it was typed.
    """
    facts, found = _judge(config, devices, world, given)
    if problems or found:
        raise Refusal([*problems, *found], subject)
    return facts


def resolve_rows(
    config: RunConfig, *, devices: Devices, problems: Collection[Problem] = (), subject: str = "the config"
) -> Batch:
    """What data alone depends on, checked as `resolve` does it: any machine can prepare data.

    The batch is that of the processes asked for, else one for each GPU here, else a single one.
    """
    case = Case(config, devices, NOTHING, None)
    case.problems += out_of_range(config)
    case.processes = config.launch.num_processes or max(devices.gpus, 1) * max(config.launch.num_machines, 1)
    check_lengths(case, model_facts(config.model))
    check_sources(case)
    batch = resolve_batch(config.trainer, case.processes, case.problems)
    if problems or case.problems:
        raise Refusal([*problems, *case.problems], subject)
    return batch


def check(
    config: RunConfig, *, devices: Devices, world: int | None = None, given: Mapping[str, str] = NOTHING
) -> list[Problem]:
    """Every cross-field problem of a config on this machine."""
    return _judge(config, devices, world, given)[1]


def _judge(
    config: RunConfig, devices: Devices, world: int | None, given: Mapping[str, str]
) -> tuple[RunFacts, list[Problem]]:
    case = Case(config, devices, given, world)
    case.problems += out_of_range(config)
    case.device = choose_device(case)
    case.processes = choose_processes(case)
    case.strategy = choose_strategy(case)
    check_launch(case)
    model = model_facts(config.model)
    check_model(case, model)
    precision = resolve_precision(config, devices, case.device, case.problems)
    check_adapter(case, model, precision)
    check_masters(case, precision)
    batch = resolve_batch(config.trainer, case.processes, case.problems)
    rate = resolve_learning_rate(config.trainer, batch, case.problems)
    check_trainer(case, batch)
    check_data(case)
    check_tracking(case)
    check_remote(case)
    stop_at = choose_stop(case)
    facts = RunFacts(
        requested_strategy=config.distributed.strategy,
        strategy=case.strategy,
        device=case.device,
        num_processes=case.processes,
        batch=batch,
        precision=precision.compute,
        precision_reason=precision.reason,
        trained_dtype=precision.trained_dtype,
        frozen_dtype=precision.frozen_dtype,
        learning_rate=rate.value,
        positions=effective_positions(config.model, model),
        notes=(*precision.notes, *(n for n in (rate.line, rate.advice) if n), *case.notes),
        stop_at=stop_at,
    )
    return facts, case.problems
