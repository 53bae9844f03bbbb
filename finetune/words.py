"""Splits a command line into verb, runs, `key=value` words and flags, and knows the help for each verb."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from finetune.errors import UserError

VERBS = {
    "train": "compose, check, prepare data, launch, train, save, verify, report (the default verb)",
    "prepare": "data only: load, check, tokenise, mask, pack, cache, show what is learnt",
}
NOT_BUILT = {
    "plan": "does it fit: memory, traffic, time, cost",
    "doctor": "checks this machine for the recipe",
    "rehearse": "the same run with a shrunken model on CPU processes",
    "fetch": "brings model and data of a recipe here",
    "evaluate": "loss, perplexity and accuracy of a run or a model",
    "generate": "answer a prompt, a file of prompts, or chat",
    "merge": "adapter or sharded checkpoint -> one standalone model folder",
    "report": "one run, or several side by side",
    "scale": "short runs on 1, 2, 4 ... processes",
}
FLAGS = {
    "--help": "this text, or a verb's",
    "--dry-run": "check config and machine and print what they come to; no data is read, nothing is started",
    "--json": "one JSON object on stdout, everything else on stderr",
    "--debug": "tracebacks, and the libraries' own output",
    "--version": "the version",
}
NOT_BUILT_FLAGS = ("--multirun",)
EXAMPLES = """\
examples:
  python -m finetune recipe=tiny_lora
  python -m finetune recipe=qwen8b_full distributed=zero3
  python -m finetune recipe=qwen8b_lora data.train='[{path: rows.jsonl}]' trainer.max_steps=100
  python -m finetune recipe=tiny_lora distributed=fsdp launch.device=cpu launch.num_processes=2

keys: recipe model adapter data trainer distributed tracking choose a file of conf/ or recipes/ (recipe=NAME
or a path);
      model.* adapter.* data.* trainer.* (trl's SFTConfig) distributed.* launch.* checkpoint.* tracking.*
      output_dir run_name seed set single values. Each is documented in finetune/config/schema.py; a wrong one
      names the nearest.
exit: 0 done, 1 the run failed, 2 something to change (told in one message), 130/143/138 stopped by
SIGINT/SIGTERM/SIGUSR1
      after a checkpoint was saved"""


@dataclass(frozen=True, slots=True)
class Words:
    """A command line, taken apart."""

    verb: str
    verb_given: bool
    runs: tuple[str, ...]
    overrides: tuple[str, ...]
    flags: frozenset[str]


def split_words(arguments: list[str]) -> Words:
    """Take the words apart; no verb means `train`."""
    flags, overrides, plain = [], [], []
    for word in arguments:
        if word.startswith("--") and "=" not in word:
            flags.append(_known_flag(word))
        elif "=" in word:
            overrides.append(word)
        else:
            plain.append(word)
    verb_given = bool(plain) and (plain[0] in VERBS or plain[0] in NOT_BUILT)
    verb = plain.pop(0) if verb_given else "train"
    if plain and verb == "train":
        raise UserError(_stray(plain[0]))
    return Words(verb, verb_given, tuple(plain), tuple(overrides), frozenset(flags))


def help_text(verb: str | None) -> str:
    if verb is not None:
        built = VERBS.get(verb)
        return f"finetune {verb}: {built or NOT_BUILT[verb] + ' (not built yet)'}\n\n{_flags()}\n\n{EXAMPLES}"
    verbs = [f"  {name:<9} {what}" for name, what in VERBS.items()]
    later = f"  not built yet: {', '.join(NOT_BUILT)}"
    usage = "usage: python -m finetune [VERB] [RUN ...] [key=value ...] [flags]"
    return "\n".join([usage, "", "verbs:", *verbs, later, "", _flags(), "", EXAMPLES])


def _flags() -> str:
    return "\n".join(["flags:", *(f"  {name:<10} {what}" for name, what in FLAGS.items())])


def _known_flag(word: str) -> str:
    if word in FLAGS:
        return word
    if word in NOT_BUILT_FLAGS:
        raise UserError(f"{word} is not built yet.")
    near = get_close_matches(word, FLAGS, n=1)
    raise UserError(
        f"{word} is no flag.{f' Did you mean {near[0]}?' if near else ''} Known: {', '.join(FLAGS)}."
    )


def _stray(word: str) -> str:
    near = get_close_matches(word, [*VERBS, *NOT_BUILT], n=1)
    hint = f"Did you mean {near[0]}?" if near else f"Verbs: {', '.join([*VERBS, *NOT_BUILT])}."
    return f"'{word}' is neither a verb nor key=value. {hint}"
