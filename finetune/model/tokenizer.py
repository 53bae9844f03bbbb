"""Which tokenizer a model speaks, how its chat template ends a turn, what pads a batch; without torch."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import hub
from finetune.config.schema import ModelConfig
from finetune.errors import UserError, refuse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)

PADDING = (
    "<|finetune_right_pad_id|>",
    "<|pad|>",
    "<pad>",
    "[PAD]",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<unk>",
    "[UNK]",
)
"""Tokens of well-known tokenizers that no text contains, best first."""

THOUGHT_NAMES = ("reasoning_content", "reasoning", "thinking")
"""What chat templates call the field of an answer that holds the thought before it."""

THINKING_SWITCHES = ("enable_thinking", "thinking")
"""What chat templates call the switch for thoughts."""

TOKENIZER_FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.json"),
    *("merges.txt", "*.model", "tekken.json", "additional_chat_templates/*", "*.py"),
)

SLOT = "@@slot{}@@"
"""Stands for a message's content where only the template's own text is looked at."""


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerFast:
    """Load the tokenizer with `model.chat_template` and a pad token that no answer ends with."""
    tokenizer = _load(model)
    if model.chat_template is not None:
        tokenizer.chat_template = _template(model.chat_template)
    if isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
        names = ", ".join(sorted(tokenizer.chat_template))
        raise refuse(
            f"model.name_or_path={model.name_or_path}",
            f"its tokenizer has several chat templates and none is called default: {names}",
            "Choose one as a file: model.chat_template=PATH.jinja",
            subject="the tokenizer",
        )
    _set_padding(tokenizer)
    return tokenizer


def tokenizer_identity(model: ModelConfig) -> list[str | None]:
    """What must be equal for two tokenizers to write the same ids; a folder's files are enough to tell."""
    template = _template(model.chat_template) if model.chat_template is not None else None
    folder = Path(model.name_or_path).expanduser()
    if not folder.is_dir() or model.gguf_file is not None:
        tokenizer = load_tokenizer(model)
        words = [tokenizer.backend_tokenizer.to_str(), str(tokenizer.special_tokens_map)]
        return [*words, str(tokenizer.chat_template)]
    digest = hashlib.sha256()
    for pattern in TOKENIZER_FILES:
        for file in sorted(file for file in folder.glob(pattern) if file.is_file()):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return [digest.hexdigest(), template, str(model.trust_remote_code)]


def turn_end(tokenizer: PreTrainedTokenizerFast) -> int:
    """Id of the token with which an answer ends: the chat template's, else the tokenizer's end of text."""
    ends = added_tokens(tokenizer).findall(answer_end(tokenizer))
    if ends:
        return int(tokenizer.convert_tokens_to_ids(ends[-1]))
    if tokenizer.eos_token_id is None:
        raise refuse(
            f"tokenizer {tokenizer.name_or_path}",
            "it has no end-of-text token, so a model could not learn to stop",
            "Set `eos_token` in its tokenizer_config.json.",
            subject="the tokenizer",
        )
    return int(tokenizer.eos_token_id)


def answer_tail(tokenizer: PreTrainedTokenizerFast) -> str:
    """What ends the last answer (`<|im_end|>\\n`): printed by the chat template, else borrowed from the turn
    that would follow; empty without a template.
    """
    if not tokenizer.chat_template:
        return ""
    own = _after_answer(tokenizer)
    return own if added_tokens(tokenizer).search(own) else own + borrowed_ends(tokenizer).get("user", "")


def answer_end(tokenizer: PreTrainedTokenizerFast) -> str:
    """The tokens that end an answer: mostly one, for Cohere two without anything between them."""
    run = re.compile(f"(?:{added_tokens(tokenizer).pattern})+").search(answer_tail(tokenizer))
    return run.group() if run else ""


def borrowed_ends(tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """Tokens by which answers end though they open the next turn, by its role (GLM: `<|user|>` and the like).

    Empty for the many templates that print an end of their own.
    """
    tokens = added_tokens(tokenizer)
    if not tokenizer.chat_template or tokens.search(_after_answer(tokenizer)):
        return {}
    ends = {}
    for role in ("user", "tool", "system"):
        try:
            opening = tokens.match(_after_answer(tokenizer, role).lstrip())
        except TemplateRefused:
            continue
        if opening:
            ends[role] = opening.group()
    return ends


def reads_thoughts(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Tell whether the chat template prints the thought that stands in a field of an answer."""
    thought = dict.fromkeys(THOUGHT_NAMES, SLOT.format(1))
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!", **thought}]
    try:
        return SLOT.format(1) in render(tokenizer, turns, **dict.fromkeys(THINKING_SWITCHES, True))
    except TemplateRefused:
        return False


def _after_answer(tokenizer: PreTrainedTokenizerFast, next_role: str | None = None) -> str:
    """The text that the chat template prints right behind an answer."""
    turns = [{"role": "user", "content": SLOT.format(0)}, {"role": "assistant", "content": SLOT.format(1)}]
    turns += [{"role": next_role, "content": SLOT.format(2)}] if next_role else []
    return render(tokenizer, turns).partition(SLOT.format(1))[2]


def thinking_switches(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The names by which the chat template asks whether to think."""
    return _switches(str(tokenizer.chat_template))


def unthinking(template: str | dict[str, str] | None) -> str | dict[str, str] | None:
    """A chat template that does not think unless it is told to: how a model trained so is to be served."""
    if isinstance(template, dict):
        return {name: _unthinking(text) for name, text in template.items()}
    return template and _unthinking(template)


def _unthinking(template: str) -> str:
    defaults = (f"{{%- set {name} = {name} | default(false) -%}}" for name in _switches(template))
    return "".join(defaults) + template


def _switches(template: str) -> list[str]:
    code = re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)
    return [name for name in THINKING_SWITCHES if re.search(rf"(?<![.'\"])\b{name}\b(?!['\"])", code)]


def render(tokenizer: PreTrainedTokenizerFast, turns: list[dict[str, Any]], **options: Any) -> str:
    """Render one conversation, or say what the chat template has against it."""
    return render_all(tokenizer, [turns], **options)[0]


def render_all(
    tokenizer: PreTrainedTokenizerFast, conversations: list[list[dict[str, Any]]], **options: Any
) -> list[str]:
    """Render many conversations at once; one refused conversation refuses them all."""
    from jinja2 import TemplateError

    try:
        return list(tokenizer.apply_chat_template(conversations, tokenize=False, **options))
    except (TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
        raise TemplateRefused(f"the chat template refuses it: {error}") from error


class TemplateRefused(UserError):
    """A chat template cannot render a conversation."""


def added_tokens(tokenizer: PreTrainedTokenizerFast) -> re.Pattern[str]:
    """A pattern that matches any token which is read as one whatever stands around it."""
    names = (token.content for token in tokenizer.added_tokens_decoder.values())
    longest_first = sorted((name for name in names if name.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _load(model: ModelConfig) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    name = model.name_or_path
    folder = Path(name).expanduser()
    if not folder.exists() and not hub.ID.fullmatch(name):
        raise refuse(
            f"model.name_or_path={name}",
            f"there is no folder {folder.absolute()}, and it is not a hub id (owner/name) either",
            subject="the model",
        )
    options: dict[str, Any] = {"revision": model.revision or "main"}
    if folder.exists():
        name = str(folder)
    elif not hub.reachable():
        options["local_files_only"] = True
    try:
        if model.gguf_file is None and not _needs_its_class(folder, model.trust_remote_code):
            return PreTrainedTokenizerFast.from_pretrained(name, **options)
        from transformers import AutoTokenizer  # imports torch: only for tokenizers that cannot do without

        options |= {"trust_remote_code": model.trust_remote_code, "use_fast": True}
        if model.gguf_file is not None:
            options["gguf_file"] = model.gguf_file
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise _no_tokenizer(model, folder, options, error) from error
    if not tokenizer.is_fast:
        raise refuse(
            f"model.name_or_path={model.name_or_path}",
            f"its tokenizer ({type(tokenizer).__name__}) has no fast version, which data preparation needs",
            "Convert it once to a tokenizer.json.",
            subject="the tokenizer",
        )
    return tokenizer


def _needs_its_class(folder: Path, trust_remote_code: bool) -> bool:
    """Tell whether the plain fast class cannot read this folder's files."""
    if not folder.is_dir():
        return False
    if not (folder / "tokenizer.json").exists():
        return (
            any(folder.glob("*.model"))
            or (folder / "vocab.json").exists()
            or (folder / "tekken.json").exists()
        )
    settings = folder / "tokenizer_config.json"
    return (
        trust_remote_code
        and settings.exists()
        and "auto_map" in json.loads(settings.read_text(encoding="utf-8"))
    )


def _no_tokenizer(model: ModelConfig, folder: Path, options: dict[str, Any], error: Exception) -> UserError:
    name, reason = (
        model.name_or_path,
        str(error).strip().splitlines()[0] if str(error).strip() else repr(error),
    )
    if folder.exists():
        files = (
            ", ".join(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else "(not a folder)"
        )
        why = f"no tokenizer could be read from {folder.absolute()}, which holds: {files}"
        fix = f"It needs tokenizer.json (and tokenizer_config.json). The library said: {reason}"
    elif "local_files_only" in options:
        why = f"there is no folder {folder.absolute()}; it is not in this machine's hub cache either, and "
        why += f"{hub.endpoint()} cannot be reached"
        fix = "Download it where there is a network, and give the folder's path."
    elif "gated" in str(error) or "401" in str(error) or "403" in str(error):
        why = "the hub does not let this account read it (gated or private)"
        fix = f"Ask for access at {hub.endpoint()}/{name}, then log in with `hf auth login` or set HF_TOKEN."
    else:
        why, fix = f"its tokenizer could not be loaded: {reason}", "Check the name and model.revision."
    return refuse(f"model.name_or_path={name}", why, fix, subject="the model")


def _template(value: str) -> str:
    if "{" in value or "\n" in value:
        return value
    path = Path(value).expanduser()
    if not path.is_file():
        raise refuse(
            f"model.chat_template={value}",
            f"there is no file {path.absolute()}",
            "Give the path of a Jinja file, or the template itself.",
            subject="the chat template",
        )
    return path.read_text(encoding="utf-8")


def _set_padding(tokenizer: PreTrainedTokenizerFast) -> None:
    learnt = {tokenizer.eos_token_id, turn_end(tokenizer)}
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in learnt:
        return
    names = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    padlike = [name for name in names if "pad" in name.lower()]
    for name in (*PADDING, *padlike):
        if names.get(name) is not None and names[name] not in learnt and name != tokenizer.bos_token:
            tokenizer.pad_token = name
            log.info("padding with %s", name)
            return
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    log.warning(
        "padding with %s, which also ends an answer: harmless here (padding is masked by position), "
        "but other programs may mask it by its id",
        tokenizer.pad_token,
    )
