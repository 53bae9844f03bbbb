"""`finetune generate [RUN]`: answers to a prompt, to a file of prompts, or in a chat."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from finetune.distributed.outer import refuse_launcher
from finetune.errors import UserError
from finetune.inference.answers import Answer
from finetune.inference.flags import fraction, number
from finetune.inference.generation import Speaker, open_speaker
from finetune.inference.prompts import Prompt, as_prompt, read_prompts
from finetune.logs import set_up_logging
from finetune.report.evaluation_text import printable, side_by_side
from finetune.report.terminal import line_width
from finetune.words import Words


def main(words: Words) -> int:
    """Answer; returns the exit code. Answers go to stdout, everything else to stderr."""
    if len(words.runs) > 1:
        raise UserError(
            f"generate takes one RUN; '{words.runs[1]}' is a second one. A prompt: --prompt 'TEXT'."
        )
    refuse_launcher("generate")
    values = words.values
    if "--prompt" in values and "--prompts" in values:
        raise UserError("--prompt and --prompts: give one of them.")
    prompts: list[Prompt] | None = None
    if "--prompt" in values:
        prompts = [as_prompt(values["--prompt"], "--prompt")]
    elif "--prompts" in values:
        prompts = read_prompts(Path(values["--prompts"]).expanduser())
    set_up_logging(main=False)
    speaker = open_speaker(
        words.runs[0] if words.runs else None,
        words.overrides,
        compare="--compare" in words.flags,
        temperature=fraction(values, "--temperature"),
        max_new_tokens=number(values, "--max-new-tokens", None),
        bits=number(values, "--bits", None),
        say=partial(print, file=sys.stderr, flush=True),
    )
    if prompts is None:
        _chat(speaker, as_json="--json" in words.flags)
    elif "--json" in words.flags:
        for answers in speaker.answers(prompts):
            print(json.dumps(_record(answers)), flush=True)
    else:
        for answers in speaker.answers(prompts):
            _show(answers, several=len(prompts) > 1)
    return 0


def _record(answers: list[Answer]) -> dict[str, object]:
    """The prompt, and each model's answer under its name."""
    fields = [{name: value for name, value in asdict(one).items() if name != "prompt"} for one in answers]
    return {"prompt": answers[0].prompt, "answers": fields}


def _show(answers: list[Answer], *, several: bool) -> None:
    if several:
        print(f"> {printable(answers[0].prompt)}")
    if len(answers) == 1:
        print(printable(answers[0].text), flush=True)
    else:
        texts = {one.model: printable(one.text) for one in answers}
        print("\n".join(side_by_side(texts, line_width())))
    for one in answers:
        if not one.finished:
            print(f"({one.model}: cut off after {one.tokens} tokens)", file=sys.stderr)
    if several:
        print(flush=True)


def _chat(speaker: Speaker, *, as_json: bool) -> None:
    from finetune.inference.chat import talk

    def write(text: str) -> None:
        if not as_json:
            print(printable(text), end="", flush=True)

    def tell(text: str) -> None:
        print(text, end="", file=sys.stderr, flush=True)

    for answers in talk(speaker, sys.stdin, write, tell, terminal=sys.stdin.isatty()):
        if as_json:
            print(json.dumps(_record(answers)), flush=True)
