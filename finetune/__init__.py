"""Fine-tune language models: a run is what it says it is, or it refuses and says why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.errors import FinetuneError, Refusal, RunFailed
from finetune.version import __version__

if TYPE_CHECKING:
    from finetune.api import Run, compare, evaluate, generate, load_config, plan, prepare, train

__all__ = [
    "FinetuneError",
    "Refusal",
    "Run",
    "RunFailed",
    "__version__",
    "compare",
    "evaluate",
    "generate",
    "load_config",
    "plan",
    "prepare",
    "train",
]


def __getattr__(name: str) -> Any:
    # heavy imports wait until they are used: `import finetune` touches neither torch nor a device
    if name in __all__:
        from finetune import api

        return getattr(api, name)
    raise AttributeError(f"module 'finetune' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
