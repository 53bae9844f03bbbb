"""Splits a command line into verb, runs, `key=value` words and flags, and knows the help for each verb."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches

from finetune.errors import UserError
from finetune.usage import EXAMPLES, OWN

VERBS = {
    "train": "compose, check, plan, prepare data, launch, train, save, verify, report (the default verb)",
    "prepare": "data only: load, check, tokenise, mask, pack, cache, show what is learnt",
    "plan": "does it fit, under which strategy, how fast, at what cost: for this machine or hardware=NAME",
    "doctor": "is this machine all right for the recipe: cards, links, memory, disks, network, software",
    "rehearse": "the whole run with a shrunken twin of the model on CPU processes: kill, resume, reload",
    "scale": "short runs on 1, 2, 4 ... processes: time per step, speed-up, verdict",
    "evaluate": "loss, perplexity, accuracy, exact match and answers of a run's model and its base on data",
    "generate": "answer a prompt, a file of prompts, or chat, with a run's model or any other",
    "merge": "a run's model, or an adapter on its base -> one standalone model folder, verified",
    "report": "one run, or several side by side, as a page: curves, memory, samples, settings, cost",
}
DEFAULT = "train"
NOT_BUILT = {
    "fetch": "brings model and data of a recipe here",
}
KEPT = {
    "train": "what the run has written stays in its folder, its checkpoints too",
    "prepare": "nothing is left but what had been prepared whole",
    "plan": "nothing had been written",
    "doctor": "nothing is left of it",
    "rehearse": "nothing is left of it",
    "scale": "the runs that had been measured whole are kept",
    "evaluate": "nothing is left of it",
    "generate": "what was answered is printed",
    "merge": "nothing is left of it",
    "report": "a page that was there stays as it was",
}
"""What an interrupted verb leaves."""
FLAGS = {
    "--help": "this text, or a verb's",
    "--json": "one JSON object on stdout, everything else on stderr",
    "--debug": "tracebacks, and the libraries' own output",
    "--version": "the version",
}
FLAGS_OF = {
    "train": {
        "--dry-run": "check config and machine and print what they come to; no data is read, nothing starts"
    },
    "doctor": {
        "--quick": "the machine alone: needs nothing but a bare Python, and starts no process of a run"
    },
    "rehearse": {"--all": "every architecture of conf/model with every method under every strategy (hours)"},
    "scale": {"--hold": "global (the default) or micro: the batch that stays as processes are added"},
    "evaluate": {
        "--samples": "N: how many rows are answered, spread evenly (100; 0: none)",
        "--metric": "NAME,...: more of the answers: final_number, or a function of yours, module:function",
        "--tasks": "NAME,...: tasks of lm-evaluation-harness, or YAML files of your own (extra: eval)",
        "--max-new-tokens": "N: the longest answer (twice the longest reference)",
        "--bits": "4 or 8: hold the base's weights in so many bits",
    },
    "generate": {
        "--prompt": "TEXT: one prompt",
        "--prompts": "FILE: one prompt a line (.txt), or rows with `prompt` or `messages` (.jsonl)",
        "--compare": "the base's answer beside the tuned model's",
        "--temperature": "X: 0 is the likeliest token each time (else: as the model was saved)",
        "--max-new-tokens": "N: the longest answer (else: as the model was saved, or 512)",
        "--bits": "4 or 8: hold the base's weights in so many bits",
    },
    "merge": {
        "--dtype": "TYPE: float32, bfloat16 or float16 instead of the base checkpoint's own",
        "--to": "DIR: where the folder is written, instead of RUN/merged (or FOLDER-merged)",
        "--push": "hub://OWNER/NAME: upload it there when it is verified (a new repository is private)",
    },
}
"""Flags that not every verb knows."""
TAKE_VALUE = frozenset(
    {*FLAGS_OF["merge"], *FLAGS_OF["scale"], *FLAGS_OF["evaluate"], *FLAGS_OF["generate"]} - {"--compare"}
)
"""Flags with a value: `--to DIR` or `--to=DIR`."""
NOT_BUILT_FLAGS = ("--multirun",)


@dataclass(frozen=True, slots=True)
class Words:
    """A command line, taken apart."""

    verb: str
    verb_given: bool
    runs: tuple[str, ...]
    overrides: tuple[str, ...]
    flags: frozenset[str]
    values: dict[str, str] = field(default_factory=dict)
    """Flags that take a value, with it."""


def split_words(arguments: list[str]) -> Words:
    """Take the words apart; no verb means `train`."""
    flags, overrides, plain = [], [], []
    values: dict[str, str] = {}
    rest = iter(arguments)
    for word in rest:
        name, equals, value = word.partition("=")
        if name in TAKE_VALUE:
            values[name] = value if equals else next(rest, "")
        elif word.startswith("--"):
            flags.append(_known_flag(name))
            if equals:
                raise UserError(f"{word}: {name} takes no value. Write {name}.")
        elif equals:
            overrides.append(word)
        else:
            plain.append(word)
    verb_given = bool(plain) and (plain[0] in VERBS or plain[0] in NOT_BUILT)
    verb = plain.pop(0) if verb_given else DEFAULT
    if plain and verb == "train":
        raise UserError(_stray(plain[0]))
    if verb in VERBS:
        _check_flags(verb, [*flags, *values], values)
    return Words(verb, verb_given, tuple(plain), tuple(overrides), frozenset(flags), values)


def help_text(verb: str | None) -> str:
    if verb is not None:
        built = VERBS.get(verb)
        text = OWN.get(verb, EXAMPLES)
        title = f"finetune {verb}: {built or NOT_BUILT[verb] + ' (not built yet)'}"
        return f"{title}\n\n{_flags(FLAGS_OF.get(verb, {}))}\n\n{text}"
    verbs = [f"  {name:<9} {what}" for name, what in VERBS.items()]
    later = f"  not built yet: {', '.join(NOT_BUILT)}"
    usage = "usage: python -m finetune [VERB] [RUN ...] [key=value ...] [flags]"
    own = [f"  {verb}: {' '.join(flags)} (see {verb} --help)" for verb, flags in FLAGS_OF.items()]
    return "\n".join([usage, "", "verbs:", *verbs, later, "", _flags({}), *own, "", EXAMPLES])


def _flags(own: dict[str, str]) -> str:
    return "\n".join(["flags:", *(f"  {name:<10} {what}" for name, what in {**own, **FLAGS}.items())])


def _known_flag(word: str) -> str:
    known = list(dict.fromkeys([*FLAGS, *(flag for own in FLAGS_OF.values() for flag in own)]))
    if word in known:
        return word
    if word in NOT_BUILT_FLAGS:
        raise UserError(f"{word} is not built yet.")
    near = get_close_matches(word, known, n=1)
    raise UserError(
        f"{word} is no flag.{f' Did you mean {near[0]}?' if near else ''} Known: {', '.join(known)}."
    )


def _check_flags(verb: str, given: list[str], values: dict[str, str]) -> None:
    """Refuse a flag of another verb, and one that lacks its value."""
    for flag in given:
        owners = [name for name, own in FLAGS_OF.items() if flag in own]
        if owners and verb not in owners:
            raise UserError(f"{flag} belongs to {' and '.join(owners)}; {verb} does not know it.")
        if flag in values and (not values[flag] or values[flag].startswith("--")):
            raise UserError(f"{flag} needs a value: {FLAGS_OF[verb][flag]}.")


def _stray(word: str) -> str:
    near = get_close_matches(word, [*VERBS, *NOT_BUILT], n=1)
    hint = f"Did you mean {near[0]}?" if near else f"Verbs: {', '.join([*VERBS, *NOT_BUILT])}."
    return f"'{word}' is neither a verb nor key=value. {hint}"
