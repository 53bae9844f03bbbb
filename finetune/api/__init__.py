"""The Python API: plan, prepare, train, ask and compare, from a script or a notebook."""

from __future__ import annotations

import warnings

from finetune.api.comparing import compare
from finetune.api.planning import load_config, plan
from finetune.api.preparing import prepare
from finetune.api.run import Run
from finetune.api.training import train
from finetune.inference.evaluation import evaluate
from finetune.inference.generation import generate

# tqdm, which libraries import in a notebook: it asks for widgets, and draws its bars without them
warnings.filterwarnings("ignore", message="IProgress not found")

__all__ = ["Run", "compare", "evaluate", "generate", "load_config", "plan", "prepare", "train"]
