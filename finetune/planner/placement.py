"""One job on so many processes under one strategy: which bytes lie where."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.config.strategy import Engine, Traits
from finetune.planner.job import Job


@dataclass(frozen=True, slots=True)
class Placement:
    """A job, a strategy and a number of processes (one for each device)."""

    job: Job
    traits: Traits
    processes: int
    reshards: bool = True
    """Gathered weights are freed after the forward pass (`distributed.reshard_after_forward`)."""
    device: str = "cuda"
    """`cpu`: host memory is where everything is, offloaded or not."""

    def share(self, what: str) -> float:
        """The part of `weights`, `gradients` or `optimizer` that one process holds."""
        return 1 / self.processes if what in self.traits.shards else 1.0

    def on_device(self, what: str) -> float:
        """The same, on its card: nothing where it is kept in host memory."""
        return 0.0 if self.offloads(what) else self.share(what)

    def offloads(self, what: str) -> bool:
        """Whether `optimizer` or `weights` live apart from what computes."""
        return what in self.traits.offloads and self.device != "cpu"

    @property
    def casts_weights(self) -> bool:
        """FSDP2 gathers weights in the compute precision, DeepSpeed holds them in it; the others compute
        under autocast from the weights as they are.
        """
        if self.job.stack.fsdp == 1 and self.job.adapter is not None:
            return False
        return self.traits.engine in (Engine.fsdp2, Engine.deepspeed)

    @property
    def used_bytes(self) -> float:
        """Bytes of a trained weight as the layers see it."""
        return (
            min(self.job.trained_bytes, self.job.compute_bytes)
            if self.casts_weights
            else self.job.trained_bytes
        )

    @property
    def residual_bytes(self) -> float:
        """Bytes of an entry of the hidden states between layers: the embedding's dtype."""
        if self.job.stack.float32_residual:
            return 4
        return self.used_bytes if self.job.adapter is None else self.job.frozen_bytes

    @property
    def hidden_bytes(self) -> float:
        """Bytes of one token's hidden state between layers."""
        return self.residual_bytes * self.job.shape.hidden_size

    @property
    def casts_adapters(self) -> bool:
        """Whether peft turns an adapter's input into float32 and autocast turns it back."""
        job = self.job
        reads = job.adapter is not None and not self.casts_weights and not job.stack.fused_mlp
        return reads and job.trained_bytes > job.compute_bytes

    @property
    def adapter_input_bytes(self) -> float:
        """Bytes of an entry of an adapter's input, as autograd keeps it."""
        job = self.job
        return job.compute_bytes if job.stack.autocast or not self.casts_adapters else job.trained_bytes

    @property
    def keeps_quantised_inputs(self) -> bool:
        return self.job.stack.keeps_quantised_inputs and self.job.quantised_bytes is not None
