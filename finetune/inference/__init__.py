"""Ask models that were trained: how well do they predict held-out rows, and what do they answer?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.inference.evaluation import Evaluation, evaluate
    from finetune.inference.generation import Answer, generate

__all__ = ["Answer", "Evaluation", "evaluate", "generate"]


def __getattr__(name: str) -> Any:
    # torch and the data libraries wait until they are used
    if name in ("Evaluation", "evaluate"):
        from finetune.inference import evaluation

        return getattr(evaluation, name)
    if name in ("Answer", "generate"):
        from finetune.inference import generation

        return getattr(generation, name)
    raise AttributeError(f"module 'finetune.inference' has no attribute '{name}'")
