"""Writes a saved model as one whole model: its adapter merged into the unquantised base, a layer at a time.

The base stays where it is, mapped from its files in the dtype that they have; merged weights live from the
moment that their layer is written until their file is full. So the process holds no more than the base as
stored, the adapter, one layer in float32 and one file of weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from finetune.config.schema import Method, RunConfig, Thinking
from finetune.errors import refuse
from finetune.model.adapter import attach_adapter
from finetune.model.export import Written, layer_of, plain_tensors, save_full, save_words
from finetune.model.float32 import merge_in_float32
from finetune.model.load import checkpoint_dtype, model_config, open_weights
from finetune.model.source import Source
from finetune.model.state import BUFFER, WEIGHT, SavedState
from finetune.model.tokenizer import TOKENIZER_FILES, load_tokenizer, turn_end, unthinking
from finetune.model.vocabulary import give_rows, make_room

BESIDE_WEIGHTS = ("tokenizer.model", "preprocessor_config.json", "processor_config.json", "*.py")
"""Files of the base that other programs look for: llama.cpp's converter, vLLM for models with towers."""


def open_source(source: Source) -> tuple[PreTrainedModel | PeftModel, torch.dtype]:
    """The model as it was trained, its base unquantised and in its own dtype, the adapter in float32."""
    config = model_config(source.model)
    dtype = checkpoint_dtype(config)
    if source.trained is not None:
        return _open_checkpoint(source, source.trained, config), dtype
    base = open_weights(config, source.model, dtype, None).eval()
    if (source.folder / "generation_config.json").exists():
        base.generation_config = base.generation_config.from_pretrained(source.folder)
    if source.adapter is None:
        return base, dtype
    _make_room(base, source)
    try:
        model = PeftModel.from_pretrained(base, str(source.folder))
        loaded = model.load_adapter(
            str(source.folder), "default"
        )  # the first call only warns of what it lacks
    except SafetensorError as error:
        why = f"its weights cannot be read: {error}"
        raise refuse(str(source.folder), why, "Restore the files.", subject="the adapter") from error
    except (RuntimeError, ValueError) as error:
        raise _does_not_fit(source, str(error).strip().splitlines()[-1].strip()) from error
    wrong = sorted([*loaded.missing_keys, *loaded.unexpected_keys])
    if wrong:
        what = f"{len(loaded.missing_keys)} tensors are missing, {len(loaded.unexpected_keys)} have no place"
        raise _does_not_fit(source, f"{what}: {', '.join(wrong[:3])}{', ...' if len(wrong) > 3 else ''}")
    return model.eval(), dtype


def _open_checkpoint(
    source: Source, trained: RunConfig, config: PretrainedConfig
) -> PreTrainedModel | PeftModel:
    """The model put together as for training, but unquantised, and filled with a checkpoint's weights."""
    full = trained.adapter.method is Method.full
    dtype = torch.float32 if full else checkpoint_dtype(config)
    base = open_weights(config, source.model, dtype, None)
    give_rows(base, load_tokenizer(source.model), trained.adapter, trained.seed)
    model = attach_adapter(base.requires_grad_(full), trained.adapter, trained.seed, source.model.revision)
    state = SavedState(source.folder)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for kind in (WEIGHT, BUFFER):
            for name in state.names(kind):
                state.read(kind, name, tensors[name].shape, 0, tensors[name].view(-1))
    return model.eval()


def write_merged(model: PreTrainedModel | PeftModel, folder: Path, dtype: torch.dtype) -> Written:
    """Write every weight and the config; `model` is used up by it."""
    if not isinstance(model, PeftModel):
        return save_full(model, folder, dtype, is_main=True)
    tuners: dict[int, list[BaseTunerLayer]] = {}
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            tuners.setdefault(id(module.get_base_layer()), []).append(module)
    plain = model.base_model.unload()
    for module in plain.modules():
        _own_weights(module, tuners.get(id(module), []))
    groups = _merged_groups(plain, tuners)
    _set_tie(plain)
    if hasattr(plain.config, "quantization_config"):
        del plain.config.quantization_config
    return save_full(plain, folder, dtype, is_main=True, groups=groups)


def source_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """The tokenizer that the model was trained with, its template as the model is to be served."""
    if source.trained is None:
        trusted = source.model.trust_remote_code
        return AutoTokenizer.from_pretrained(words_folder(source), trust_remote_code=trusted)
    tokenizer = load_tokenizer(source.model)
    if source.trained.data.thinking is Thinking.off:
        tokenizer.chat_template = unthinking(tokenizer.chat_template)
    return tokenizer


def write_words(source: Source, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, to: Path) -> None:
    """Copy what belongs to a model beside its weights, byte for byte: the run's files, else the base's. A
    checkpoint has none yet: they are written as a run writes them.
    """
    if source.trained is not None:
        _copy(source.base, BESIDE_WEIGHTS, to)
        save_words(model, tokenizer, to, turn_end(tokenizer))
        return
    home = words_folder(source)
    _copy(source.base, BESIDE_WEIGHTS, to)
    _copy(home, TOKENIZER_FILES, to)
    template = tokenizer.chat_template
    if isinstance(template, str) and not (to / "chat_template.jinja").exists():
        (to / "chat_template.jinja").write_text(template, encoding="utf-8")
    model.generation_config.save_pretrained(to)


def _copy(place: Path, patterns: tuple[str, ...], to: Path) -> None:
    for file in (found for pattern in patterns for found in place.glob(pattern) if found.is_file()):
        (to / file.relative_to(place)).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, to / file.relative_to(place))


def words_folder(source: Source) -> Path:
    """Where the tokenizer lies that the model was trained with."""
    saved = (source.folder / "tokenizer.json", source.folder / "tokenizer_config.json")
    return source.folder if any(file.exists() for file in saved) else source.base


def _merged_groups(
    model: PreTrainedModel, tuners: dict[int, list[BaseTunerLayer]]
) -> Iterator[dict[str, torch.Tensor]]:
    """The plain model's tensors by layer; a layer is merged when its turn comes, and let go after it."""
    names = [name for name, _ in plain_tensors(model)]
    for _, group in groupby(names, key=layer_of):
        tensors, merged = {}, []
        for name in group:
            module = model.get_submodule(name.rpartition(".")[0])
            for tuner in tuners.pop(id(module), []):
                merge_in_float32(tuner)
                merged.append(module)
            tensors[name] = getattr(module, name.rpartition(".")[2])
        yield tensors
        tensors.clear()
        for module in merged:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.new_empty(0)


def _own_weights(module: torch.nn.Module, tuners: list[BaseTunerLayer]) -> None:
    """Weights that will be merged are no longer shared with another layer: a tied head keeps the old ones.

    Single trained tokens are the exception: peft trains them for both layers of a tied pair.
    """
    if not tuners or all(isinstance(tuner, TrainableTokensLayer) for tuner in tuners):
        return
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, torch.nn.Parameter(parameter.data, requires_grad=False))


def _set_tie(model: PreTrainedModel) -> None:
    """The config's tie flag says what the file holds, as trained layers may have parted from each other."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = tied


def _make_room(base: PreTrainedModel, source: Source) -> None:
    """Give the base as many embedding rows as the adapter was trained with: tokens may have been added."""
    wanted = make_room(base, source.folder)
    settings = words_folder(source) / "tokenizer.json"
    tokens = _number_of_tokens(settings) if settings.exists() else 0
    if tokens > wanted:
        raise refuse(
            str(source.folder),
            f"its tokenizer knows {tokens:,} tokens, the base has {wanted:,}, and the adapter holds no "
            "weights for the others: what was learnt of them was never saved",
            "Train with adapter.modules_to_save='[embed_tokens, lm_head]'.",
            subject="the adapter",
        )


def _number_of_tokens(file: Path) -> int:
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"].get("vocab", [])
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return max([*ids, *(token["id"] for token in content.get("added_tokens", []))], default=-1) + 1


def _does_not_fit(source: Source, why: str) -> Exception:
    fix = "Give the base that it was trained on: model.name_or_path=DIR."
    where = f"{source.folder} on {source.model.name_or_path}"
    return refuse(where, f"the adapter does not fit this base: {why}", fix, subject="the adapter")
