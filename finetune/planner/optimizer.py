"""What each optimizer of the Trainer keeps for a trained weight."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Optimizer:
    """States of one trained weight."""

    copies: float = 0.0
    """States in the weight's own dtype."""
    bytes: float = 0.0
    """States in a dtype of their own, bytes for each weight."""
    step_copies: float = 0.0
    """Copies that live while it steps: torch's `foreach` kernels build the update of all weights at once."""
    paged: bool = False
    """States may move to host memory under pressure (bitsandbytes, CUDA's managed memory)."""

    def state_bytes(self, weight_bytes: float) -> float:
        return self.copies * weight_bytes + self.bytes


_BLOCK = 4 / 256
"""bitsandbytes keeps one float32 scale for each 256 entries of an 8-bit state."""

ADAM = Optimizer(copies=2, step_copies=1)
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw_torch": ADAM,
    "adamw_torch_fused": Optimizer(copies=2),
    "adamw_apex_fused": Optimizer(copies=2),
    "adamw_anyprecision": Optimizer(copies=2),
    "adafactor": Optimizer(bytes=0.01),
    "adamw_bnb_8bit": Optimizer(bytes=2 * (1 + _BLOCK)),
    "adamw_8bit": Optimizer(bytes=2 * (1 + _BLOCK)),
    "paged_adamw_8bit": Optimizer(bytes=2 * (1 + _BLOCK), paged=True),
    "paged_adamw_32bit": Optimizer(bytes=8, paged=True),
    "paged_adamw": Optimizer(bytes=8, paged=True),
    "ademamix": Optimizer(bytes=12),
    "ademamix_8bit": Optimizer(bytes=3 * (1 + _BLOCK)),
    "paged_ademamix_32bit": Optimizer(bytes=12, paged=True),
    "paged_ademamix_8bit": Optimizer(bytes=3 * (1 + _BLOCK), paged=True),
    "lion_32bit": Optimizer(bytes=4),
    "lion_8bit": Optimizer(bytes=1 + _BLOCK),
    "paged_lion_32bit": Optimizer(bytes=4, paged=True),
    "paged_lion_8bit": Optimizer(bytes=1 + _BLOCK, paged=True),
    "adamw_torch_8bit": Optimizer(bytes=2 * (1 + _BLOCK)),
    "adamw_torch_4bit": Optimizer(bytes=1 + 2 * 4 / 128),
    "sgd": Optimizer(step_copies=1),
    "adagrad": Optimizer(copies=1, step_copies=1),
    "rmsprop": Optimizer(copies=1, step_copies=1),
    "rmsprop_bnb": Optimizer(bytes=4),
    "rmsprop_bnb_32bit": Optimizer(bytes=4),
    "rmsprop_bnb_8bit": Optimizer(bytes=1 + _BLOCK),
}


def optimizer_named(name: str) -> Optimizer:
    """By the Trainer's `optim`; one that is not in the table is taken for AdamW, the largest of the usual."""
    return OPTIMIZERS.get(name, ADAM)
