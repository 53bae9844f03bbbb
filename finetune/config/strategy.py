"""What each strategy is: one row of traits, read by the renderer, the verifier and the planner alike."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from finetune.config.schema import Strategy


class Engine(StrEnum):
    """The library that spreads the work."""

    none = "none"
    ddp = "ddp"
    fsdp2 = "fsdp2"
    deepspeed = "deepspeed"


@dataclass(frozen=True, slots=True)
class Traits:
    """What a strategy does with the states of the weights that are trained."""

    engine: Engine
    launches_with: str
    """accelerate's `distributed_type` for it."""
    shards: tuple[str, ...] = ()
    """Which of `optimizer`, `gradients`, `weights` are spread over the processes."""
    zero_stage: int = 0
    offloads: tuple[str, ...] = ()
    """Which of `optimizer`, `weights` live in host memory between uses."""

    @property
    def shards_weights(self) -> bool:
        return "weights" in self.shards


_ALL = ("optimizer", "gradients", "weights")

TRAITS: dict[Strategy, Traits] = {
    Strategy.single: Traits(Engine.none, "NO"),
    Strategy.ddp: Traits(Engine.ddp, "MULTI_GPU"),
    Strategy.fsdp: Traits(Engine.fsdp2, "FSDP", _ALL),
    Strategy.fsdp_offload: Traits(Engine.fsdp2, "FSDP", _ALL, offloads=("optimizer", "weights")),
    Strategy.zero1: Traits(Engine.deepspeed, "DEEPSPEED", ("optimizer",), zero_stage=1),
    Strategy.zero2: Traits(Engine.deepspeed, "DEEPSPEED", ("optimizer", "gradients"), zero_stage=2),
    Strategy.zero2_offload: Traits(
        Engine.deepspeed, "DEEPSPEED", ("optimizer", "gradients"), zero_stage=2, offloads=("optimizer",)
    ),
    Strategy.zero3: Traits(Engine.deepspeed, "DEEPSPEED", _ALL, zero_stage=3),
    Strategy.zero3_offload: Traits(
        Engine.deepspeed, "DEEPSPEED", _ALL, zero_stage=3, offloads=("optimizer", "weights")
    ),
}
