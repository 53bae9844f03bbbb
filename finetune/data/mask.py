"""Which characters of a rendered conversation are learnt: the answers and the token that ends each.

A chat template prints its own text around the contents of the turns. That text is found once for each order
of roles, by rendering marks in place of the contents; a row's answers then lie where its own contents stand.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from finetune.data.format import Example
from finetune.errors import UserError, refuse
from finetune.model.tokenizer import SLOT, TemplateRefused, added_tokens, answer_tail, render, render_all

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)

Span = tuple[int, int]

MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*\Z")
BEFORE_END = re.compile(r"\s*\Z")


class Unmaskable(UserError):
    """A conversation in which the answers cannot be told from the rest."""

    fix = (
        "A template that rewrites turns has no right mask for them. Use data.loss_on=last_assistant, split "
        "the conversations, or give a template that keeps turns as they are: model.chat_template=PATH.jinja"
    )


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A template's own text for one order of roles: pieces[0], content of turns[0], pieces[1], ..."""

    pieces: list[str]
    turns: list[int]
    learnt_before: dict[int, int]
    """By answer: how many characters of the piece before its content the model has to write itself."""
    learnt_after: dict[int, int]
    """By answer: how many characters of the piece after its content, up to the end token, are learnt."""


class ChatMask:
    """Renders conversations and finds the learnt characters, for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.tokens = added_tokens(tokenizer)
        self.end = self.tokens.search(answer_tail(tokenizer))
        self.skeletons: dict[str, Skeleton | None] = {}
        self.header = self._header()
        if self.end is None:
            raise refuse(
                f"the chat template of {tokenizer.name_or_path}",
                f"after an answer it prints {answer_tail(tokenizer)!r}, which has no end token in it: "
                "a model trained on it would never learn to stop",
                "Give one that prints {{ eos_token }} after each answer: model.chat_template=PATH.jinja",
                subject="the chat template",
            )

    def render(self, examples: Sequence[Example]) -> list[str | UserError]:
        """Render each conversation; a refused one gives its error instead."""
        if examples and not any(example.tools for example in examples):
            try:
                return list(render_all(self.tokenizer, [example.turns or [] for example in examples]))
            except TemplateRefused:
                log.debug("a row of this batch is refused by the chat template; rendering row by row")
        return [self._render_one(example) for example in examples]

    def spans(self, example: Example, text: str) -> list[Span]:
        """Find the learnt characters of `text`, the rendered example."""
        turns = example.turns
        assert turns is not None
        skeleton = self._skeleton(turns, example.tools)
        places = _places(skeleton, turns, text) if skeleton else None
        if skeleton is None or places is None or not skeleton.learnt_after.keys() >= set(example.answers):
            return [self._span_by_prefix(example, answer, text, skeleton) for answer in example.answers]
        return [
            (
                places[answer][0] - skeleton.learnt_before[answer],
                places[answer][1] + skeleton.learnt_after[answer],
            )
            for answer in example.answers
        ]

    def _render_one(self, example: Example) -> str | UserError:
        assert example.turns is not None
        try:
            return render(self.tokenizer, example.turns, tools=example.tools)
        except TemplateRefused as error:
            return error

    def _skeleton(self, turns: list[dict[str, Any]], tools: list[Any] | None) -> Skeleton | None:
        simple = tools is None and all(len(turn) == 2 for turn in turns)
        shape = [turn["role"] if simple else {**turn, "content": ""} for turn in turns]
        key = json.dumps([shape, tools], sort_keys=True, default=str)
        if key not in self.skeletons:
            if len(self.skeletons) > 10_000:
                self.skeletons.clear()
            self.skeletons[key] = self._build_skeleton(turns, tools)
        return self.skeletons[key]

    def _build_skeleton(self, turns: list[dict[str, Any]], tools: list[Any] | None) -> Skeleton | None:
        marked = [{**turn, "content": SLOT.format(place)} for place, turn in enumerate(turns)]
        try:
            text, generated = self._render_with_markers(marked, tools)
        except TemplateRefused:
            return None
        starts = {place: text.find(SLOT.format(place)) for place in range(len(turns))}
        shown = [place for place in starts if starts[place] >= 0]
        ends = {place: starts[place] + len(SLOT.format(place)) for place in shown}
        in_order = all(ends[a] <= starts[b] for a, b in pairwise(shown))
        once = all(text.count(SLOT.format(place)) == 1 for place in shown)
        if not shown or not in_order or not once:
            return None
        edges = [0, *(edge for place in shown for edge in (starts[place], ends[place])), len(text)]
        pieces = [text[edges[i] : edges[i + 1]] for i in range(0, len(edges), 2)]
        skeleton = Skeleton(pieces, shown, {}, {})
        for number, place in enumerate(shown):
            if turns[place]["role"] != "assistant":
                continue
            covering = [
                start for start, end in generated or () if start <= starts[place] and ends[place] <= end
            ]
            if generated is not None and not covering:
                continue
            after = self._length_through_end(pieces[number + 1], calls_tools="tool_calls" in turns[place])
            if after is None:
                continue
            begin = starts[place] - self._length_to_learn(marked, place, tools, text, pieces[number])
            begin = max([begin, *covering])
            skeleton.learnt_before[place] = starts[place] - begin
            skeleton.learnt_after[place] = after
        return skeleton

    def _render_with_markers(
        self, turns: list[dict[str, Any]], tools: list[Any] | None
    ) -> tuple[str, list[Span] | None]:
        from transformers.utils.chat_template_utils import render_jinja_template

        text = render(self.tokenizer, turns, tools=tools)
        template = self.tokenizer.get_chat_template(None, tools)
        if not MARKERS.search(template):
            return text, None
        rendered, spans = render_jinja_template(
            conversations=[turns],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        return rendered[0], spans[0]

    def _length_to_learn(
        self, turns: list[dict[str, Any]], place: int, tools: list[Any] | None, text: str, before: str
    ) -> int:
        """How many characters before an answer's content come after the prompt of its generation."""
        if EMPTY_THOUGHT.search(before):
            return 0
        prompt = self._prompt(turns[:place], tools)
        if prompt is not None and text.startswith(prompt):
            length = text.find(SLOT.format(place)) - len(prompt)
            return length if 0 <= length <= len(before) else 0
        header = self.header
        return len(before) - before.rfind(header) - len(header) if header and header in before else 0

    def _length_through_end(self, after: str, *, calls_tools: bool) -> int | None:
        """How many characters after an answer belong to it: its tool calls if any, through the end token."""
        assert self.end is not None
        place = after.find(self.end.group())
        first = self.tokens.search(after)
        if first is None:
            return None
        if place == first.start() or (calls_tools and place >= 0):
            return place + len(self.end.group())
        if BEFORE_END.match(after[: first.start()]) and first.group() not in self.header:
            return first.end()
        return None

    def _header(self) -> str:
        """What the template adds when an answer is to be generated (`<|im_start|>assistant\\n`)."""
        turns = [{"role": "user", "content": SLOT.format(0)}]
        with_header, without = self._prompt(turns, None), render(self.tokenizer, turns)
        return with_header[len(without) :] if with_header and with_header.startswith(without) else ""

    def _prompt(self, turns: list[dict[str, Any]], tools: list[Any] | None) -> str | None:
        try:
            return render(self.tokenizer, turns, tools=tools, add_generation_prompt=True)
        except TemplateRefused:
            return None

    def _span_by_prefix(self, example: Example, answer: int, text: str, skeleton: Skeleton | None) -> Span:
        """Find an answer right behind the prompt that leads to it: for templates that read the contents."""
        turns = example.turns
        assert turns is not None
        prompt = self._prompt(turns[:answer], example.tools)
        if prompt is None or not text.startswith(prompt):
            raise Unmaskable(
                f"turn {answer + 1} does not continue the prompt that the template makes of the turns before"
            )
        start = len(prompt)
        thought = re.compile(r"\s*(?:<think>)?\s*</think>\s*").match(text, start)
        content = turns[answer]["content"]
        if prompt.rstrip().endswith("<think>") and content.lstrip().startswith("<think>"):
            content = (
                content.lstrip().removeprefix("<think>").lstrip("\n")
            )  # the prompt has opened the thought
        leads = {start: start, **({thought.end(): thought.end()} if thought else {})}
        if skeleton is not None and answer in skeleton.learnt_before:
            leads[start + skeleton.learnt_before[answer]] = start
        for content_start, learnt_start in leads.items():
            for variant in _variants(content):
                if text.startswith(variant, content_start):
                    stop = content_start + len(variant)
                    after = self._length_through_end(text[stop:], calls_tools="tool_calls" in turns[answer])
                    if after is not None:
                        return learnt_start, stop + after
        raise Unmaskable(
            f"turn {answer + 1}: the chat template does not print this answer as it is in the data, but as "
            f"{_excerpt(text[start : start + 60])}"
        )


def _places(skeleton: Skeleton, turns: list[dict[str, Any]], text: str) -> dict[int, Span] | None:
    """Where each turn's content stands, if the text is exactly the skeleton with the contents in it."""
    pieces = skeleton.pieces
    if not text.startswith(pieces[0]):
        return None
    position = len(pieces[0])
    places: dict[int, Span] = {}
    for number, place in enumerate(skeleton.turns):
        after = pieces[number + 1]
        for variant in _variants(turns[place]["content"]):
            end = position + len(variant)
            if text.startswith(variant, position) and text.startswith(after, end):
                break
        else:
            return None
        places[place] = (position, end)
        position = end + len(after)
    return places if position == len(text) else None


def _variants(content: str) -> list[str]:
    """A content as typed, and as templates trim it."""
    if content == content.strip():
        return [content]
    return [
        content,
        content.strip(),
        content.lstrip(),
        content.rstrip(),
        content.strip("\n"),
        content.lstrip("\n"),
    ]


def _excerpt(text: str) -> str:
    return repr(text if len(text) < 60 else text[:57] + "...")
