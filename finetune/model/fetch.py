"""Brings a model from the hub into its cache once, before any worker starts. Imports no torch."""

from __future__ import annotations

import os

from finetune import hub
from finetune.config.schema import ModelConfig
from finetune.errors import refuse

NEEDED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]
"""Weights are taken as safetensors alone; a GGUF file is named by `model.gguf_file`."""


def fetch_config(model: ModelConfig) -> bool:
    """Download a hub model's config.json alone; whether it came (`fetch_model` says what is wrong)."""
    name = model.name_or_path
    if os.path.exists(os.path.expanduser(name)) or not hub.ID.fullmatch(name):
        return False
    if hub.cached(name, model.revision) or not hub.reachable():
        return False
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        hf_hub_download(name, "config.json", revision=model.revision)
    except (HfHubHTTPError, OSError):
        return False
    return True


def fetch_model(model: ModelConfig) -> None:
    """Download what is missing of a hub model, or say in one message why it cannot be had.

    Where the hub is out of reach the workers are told to read the cache alone, instead of asking for minutes.
    """
    if os.path.exists(os.path.expanduser(model.name_or_path)):
        return
    if not hub.reachable():
        os.environ["HF_HUB_OFFLINE"] = "1"
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        snapshot_download(
            model.name_or_path,
            revision=model.revision,
            allow_patterns=[model.gguf_file, "*.json"] if model.gguf_file else NEEDED,
            local_files_only=not hub.reachable(),
        )
    except GatedRepoError as error:
        why, fix = (
            "the hub does not let this account read it (gated)",
            "Ask for access on its page, then log in.",
        )
        raise refuse(f"model.name_or_path={model.name_or_path}", why, fix, subject="the model") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise refuse(
            f"model.name_or_path={model.name_or_path}",
            f"there is no folder of that name, and it cannot be had from {hub.endpoint()}: {error}",
            "Check the name and model.revision, or give the path of a folder.",
            subject="the model",
        ) from error
