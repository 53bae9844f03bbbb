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
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from finetune.data.convert import Example
from finetune.data.turns import THOUGHT
from finetune.errors import UserError, refuse
from finetune.model.tokenizer import (
    SLOT,
    THINKING_SWITCHES,
    TemplateRefused,
    added_tokens,
    answer_end,
    answer_tail,
    borrowed_ends,
    render,
    render_all,
)

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


class UnprintedCall(Unmaskable):
    """A tool call of which the chat template shows nothing: an empty answer would be learnt."""

    fix = (
        "Use a model whose template prints tool calls, give one (model.chat_template=PATH.jinja), or drop "
        "these rows."
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
    unmarked: frozenset[int]
    """Answers that the template's generation markers leave out: they are not learnt."""


class ChatMask:
    """Renders conversations and finds the learnt characters, for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.tokens = added_tokens(tokenizer)
        end = answer_end(tokenizer)
        self.borrowed = borrowed_ends(tokenizer)
        self.ends = re.compile("|".join(map(re.escape, {*self.borrowed.values()} or [end])))
        self.skeletons: dict[str, Skeleton | None] = {}
        self.header = self._header()
        if not end:
            raise refuse(
                f"the chat template of {tokenizer.name_or_path}",
                f"after an answer it prints {answer_tail(tokenizer)!r}, which has no end token in it: "
                "a model trained on it would never learn to stop",
                "Give one that prints {{ eos_token }} after each answer: model.chat_template=PATH.jinja",
                subject="the chat template",
            )

    def render(self, examples: Sequence[Example]) -> list[str | UserError]:
        """Render each conversation; a refused one gives its error instead."""
        if examples and not any(example.tools or example.thinking is not None for example in examples):
            try:
                texts = render_all(self.tokenizer, [example.turns or [] for example in examples])
                return [self._ended(text, e.turns or []) for text, e in zip(texts, examples, strict=True)]
            except TemplateRefused:
                log.debug("a row of this batch is refused by the chat template; rendering row by row")
        return [self._render_one(example) for example in examples]

    def spans(self, example: Example, text: str) -> list[Span]:
        """Find the learnt characters of `text`, the rendered example."""
        turns = example.turns
        assert turns is not None
        for place in example.answers:
            for call in turns[place].get("tool_calls", ()):
                called = call["function"]["name"]
                if called not in text:
                    why = f"turn {place + 1} calls {called}, and the chat template does not print it"
                    raise UnprintedCall(why)
        skeleton = self._skeleton(example)
        answers = [answer for answer in example.answers if not skeleton or answer not in skeleton.unmarked]
        places = _places(skeleton, turns, text) if skeleton else None
        if skeleton is None or places is None or not skeleton.learnt_after.keys() >= set(answers):
            return [self._span_by_prefix(example, answer, text, skeleton) for answer in answers]
        return [
            (
                places[answer][0] - skeleton.learnt_before[answer],
                places[answer][1] + skeleton.learnt_after[answer],
            )
            for answer in answers
        ]

    def _render_one(self, example: Example) -> str | UserError:
        assert example.turns is not None
        try:
            return self._render(example.turns, _options(example))
        except TemplateRefused as error:
            return error

    def _render(self, turns: list[dict[str, Any]], options: dict[str, Any]) -> str:
        return self._ended(render(self.tokenizer, turns, **options), turns)

    def _ended(self, text: str, turns: list[dict[str, Any]]) -> str:
        """Put the end behind a last answer that the template leaves open."""
        if not self.borrowed or turns[-1]["role"] != "assistant":
            return text
        follows = "tool" if "tool_calls" in turns[-1] and "tool" in self.borrowed else "user"
        return text + self.borrowed.get(follows, "")

    def _skeleton(self, example: Example) -> Skeleton | None:
        """The skeleton of an example's turns; of those with calls or thoughts it holds for this one alone."""
        turns = example.turns or []
        options = _options(example)
        if any(len(turn) > 2 for turn in turns):
            return self._build_skeleton(turns, options)
        key = json.dumps([[turn["role"] for turn in turns], options], sort_keys=True, default=str)
        if key not in self.skeletons:
            if len(self.skeletons) > 10_000:
                self.skeletons.clear()
            self.skeletons[key] = self._build_skeleton(turns, options)
        return self.skeletons[key]

    def _build_skeleton(self, turns: list[dict[str, Any]], options: dict[str, Any]) -> Skeleton | None:
        marked = [{**turn, "content": SLOT.format(place)} for place, turn in enumerate(turns)]
        try:
            text, generated = self._render_with_markers(marked, options)
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
        answers = [place for place in shown if turns[place]["role"] == "assistant"]
        marked_from = _marked_from(generated, edges, shown)
        unmarked = frozenset(answers) - marked_from.keys() if generated is not None else frozenset()
        skeleton = Skeleton(pieces, shown, {}, {}, unmarked)
        for number, place in enumerate(shown):
            if place not in answers or place in unmarked:
                continue
            after = self._length_through_end(pieces[number + 1], calls_tools="tool_calls" in turns[place])
            if after is None:
                continue
            begin = starts[place] - self._length_to_learn(marked, place, options, text, pieces[number])
            begin = max(begin, marked_from.get(place, begin))
            skeleton.learnt_before[place] = starts[place] - begin
            skeleton.learnt_after[place] = after
        return skeleton

    def _render_with_markers(
        self, turns: list[dict[str, Any]], options: dict[str, Any]
    ) -> tuple[str, list[Span] | None]:
        from transformers.utils.chat_template_utils import render_jinja_template

        text = self._render(turns, options)
        template = self.tokenizer.get_chat_template(None, options.get("tools"))
        if not MARKERS.search(template):
            return text, None
        rendered, spans = render_jinja_template(
            conversations=[turns],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **options},
        )
        return self._ended(rendered[0], turns), spans[0]

    def _length_to_learn(
        self, turns: list[dict[str, Any]], place: int, options: dict[str, Any], text: str, before: str
    ) -> int:
        """How many characters before an answer's content come after the prompt of its generation."""
        if EMPTY_THOUGHT.search(before):
            return 0
        prompt = self._prompt(turns[:place], options)
        if prompt is not None and text.startswith(prompt):
            length = text.find(SLOT.format(place)) - len(prompt)
            return length if 0 <= length <= len(before) else 0
        header = self.header
        return len(before) - before.rfind(header) - len(header) if header and header in before else 0

    def _length_through_end(self, after: str, *, calls_tools: bool) -> int | None:
        """How many characters after an answer belong to it: its tool calls if any, through the end token."""
        end, first = self.ends.search(after), self.tokens.search(after)
        if first is None:
            return None
        if end is not None and (calls_tools or end.start() == first.start()):
            return end.end()
        if BEFORE_END.match(after[: first.start()]) and first.group() not in self.header:
            return first.end()
        return None

    def _header(self) -> str:
        """What the template adds when an answer is to be generated (`<|im_start|>assistant\\n`)."""
        turns = [{"role": "user", "content": SLOT.format(0)}]
        with_header, without = self._prompt(turns, {}), render(self.tokenizer, turns)
        return with_header[len(without) :] if with_header and with_header.startswith(without) else ""

    def _prompt(self, turns: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
        try:
            return render(self.tokenizer, turns, **options, add_generation_prompt=True)
        except TemplateRefused:
            return None

    def _span_by_prefix(self, example: Example, answer: int, text: str, skeleton: Skeleton | None) -> Span:
        """Find an answer right behind the prompt that leads to it: for templates that read the contents."""
        turns = example.turns
        assert turns is not None
        prompt = self._prompt(turns[:answer], _options(example))
        if prompt is None or not text.startswith(prompt):
            raise Unmaskable(
                f"turn {answer + 1} does not continue the prompt that the template makes of the turns before"
            )
        start = len(prompt)
        empty = re.compile(r"\s*(?:<think>)?\s*</think>\s*").match(text, start)
        leads = {**({empty.end(): empty.end()} if empty else {}), start: start}
        if skeleton is not None and answer in skeleton.learnt_before:
            leads[start + skeleton.learnt_before[answer]] = start
        contents = _with_and_without_thought(turns[answer]["content"], opened="<think>" in prompt[-20:])
        for (content_start, learnt_start), content in product(leads.items(), contents):
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


def _marked_from(generated: list[Span] | None, edges: list[int], shown: list[int]) -> dict[int, int]:
    """By turn whose content a generation block covers: where the first block of that turn begins."""
    first = {}
    for number, place in enumerate(shown):
        before, start, end = edges[2 * number], edges[2 * number + 1], edges[2 * number + 2]
        blocks = [begin for begin, stop in generated or () if before <= begin <= start]
        if any(begin <= start and end <= stop for begin, stop in generated or ()):
            first[place] = min(blocks, default=start)
    return first


def _with_and_without_thought(content: str, *, opened: bool) -> list[str]:
    """An answer as templates may print it; with `opened` the prompt has begun its thought already."""
    written = THOUGHT.match(content)
    if written is None:
        return [content]
    whole = content.lstrip().removeprefix("<think>").lstrip("\n") if opened else content
    return [whole, content[written.end() :]]


def _options(example: Example) -> dict[str, Any]:
    """What the chat template is told beside the turns; templates call the switch for thinking either name."""
    options: dict[str, Any] = {}
    if example.tools:
        options["tools"] = example.tools
    if example.thinking is not None:
        options |= dict.fromkeys(THINKING_SWITCHES, example.thinking)
    return options


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
