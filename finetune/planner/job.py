"""What a run trains, as far as memory and time depend on it; strategy and machine come apart."""

from __future__ import annotations

from dataclasses import dataclass, field

from finetune.planner.optimizer import Optimizer
from finetune.planner.shape import Linear, Shape
from finetune.planner.stack import Recompute, Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A low-rank adapter on a frozen model."""

    r: int
    targets: frozenset[str]
    """Names of `Shape.linears` that carry it."""
    experts: bool = False
    """Also on the experts' matrices."""
    dropout: bool = False
    dora: bool = False
    """Magnitude and direction are trained apart (arXiv:2402.09353)."""
    whole: int = 0
    """Parameters of modules that are trained in full beside it."""

    def on(self, linear: Linear) -> bool:
        return linear.name in self.targets and (linear.copies == 1 or self.experts)

    def parameters(self, shape: Shape) -> int:
        """r (inputs + outputs) for each matrix (arXiv:2106.09685), and the modules trained in full."""
        rows = sum((lin.inputs + lin.outputs) * lin.copies for lin in shape.linears if self.on(lin))
        return self.r * rows * shape.num_hidden_layers + self.whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run. Sizes are bytes for each weight."""

    shape: Shape
    adapter: Adapter | None
    """None: full fine-tuning."""
    trained_bytes: float
    frozen_bytes: float = 2
    quantised_bytes: float | None = None
    """Of a matrix that is stored in 4 or 8 bits, its constants included."""
    compute_bytes: int = 2
    optimizer: Optimizer
    tokens: int
    """Of a micro batch on one device."""
    row_tokens: int
    """Of its longest row."""
    eval_tokens: int = 0
    """Of a micro batch of the evaluation; 0: there is none."""
    recompute: Recompute
    accumulates: bool = False
    """Several micro batches make a step: gradients are there while the next one runs."""
    stack: Stack = field(default_factory=Stack)

    @property
    def trained(self) -> int:
        """Parameters that are trained."""
        return self.shape.parameters if self.adapter is None else self.adapter.parameters(self.shape)

    @property
    def frozen_weights(self) -> float:
        """Bytes of the frozen weights."""
        if self.adapter is None:
            return self.shape.tower_parameters * self.frozen_bytes
        whole = self.shape.parameters + self.shape.tower_parameters
        return self.frozen_weights_of(whole, self.quantised_parameters)

    def frozen_weights_of(self, parameters: int, matrices: int) -> float:
        """Bytes of so many frozen parameters, `matrices` of them quantised where the run quantises."""
        if self.quantised_bytes is None:
            return parameters * self.frozen_bytes
        rest = 4 if self.stack.float32_rest else self.frozen_bytes
        return matrices * self.quantised_bytes + (parameters - matrices) * rest

    @property
    def quantised_parameters(self) -> int:
        """bitsandbytes replaces linear modules; experts that transformers stacks into one tensor are none."""
        shape = self.shape
        quantised = [lin for lin in shape.linears if lin.copies == 1 or self.stack.experts_in_turn]
        return sum(linear.parameters for linear in quantised) * shape.num_hidden_layers

    @property
    def runs_layers_twice(self) -> bool:
        """Whether a whole layer is run again in its backward pass."""
        return self.recompute in (Recompute.full, Recompute.offload)

    @property
    def casts(self) -> bool:
        """Whether trained weights are cast before they are used."""
        return self.stack.autocast and self.trained_bytes > self.compute_bytes
