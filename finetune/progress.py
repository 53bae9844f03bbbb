"""How far is a long stage? A bar where somebody watches, elsewhere a line now and then. Imports no torch.

A worker's output goes through a process that masks secrets, and from there to the terminal: lines arrive when
they will. So a bar stands alone on the last line, whoever prints a line clears it first (`CLEAR`), and it is
drawn again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from time import monotonic
from typing import Any, TextIO

CLEAR = "\r\x1b[K"
DRAWN_SECONDS, TOLD_SECONDS = 0.5, 30.0
"""Between two looks at a bar, and between two lines where there is none."""

COUNTED = "{desc}  {bar:20}  {n_fmt}/{total_fmt}{unit}  {elapsed}, {remaining} left"
COUNTING = "{desc}  {n_fmt}{unit}  {elapsed}"
WAITING = "{desc}  {elapsed}"

_screen: TextIO | None = None
_current: Stage | None = None
_bars = 0
"""That are drawn on this process's own terminal."""


def is_screen(descriptor: int) -> bool:
    """A terminal that a bar can be drawn on."""
    return os.isatty(descriptor) and os.environ.get("TERM", "dumb") != "dumb"


def draw_on(descriptor: int) -> None:
    """Draw bars there from now on: a process that sends its output elsewhere says where its terminal is."""
    global _screen
    _screen = os.fdopen(descriptor, "w", encoding="utf-8", errors="replace", closefd=False)


def current() -> Stage | None:
    """The stage that goes on."""
    return _current


def clearing() -> str:
    """What a line of this process begins with while it draws a bar."""
    return CLEAR if _bars else ""


@dataclass(slots=True)
class Stage:
    """A stage that goes on."""

    what: str
    unit: str
    total: int | None
    done: int = 0
    bar: Any = None
    """tqdm's."""

    def advance(self, number: int = 1) -> None:
        """So much more is done."""
        self.done += number
        if self.bar is not None:
            self.bar.update(number)

    def over(self, things: Collection[Any]) -> Iterator[Any]:
        """Count them as they are taken, from none."""
        self.done, self.total = 0, len(things)
        if self.bar is not None:
            self.bar.reset(self.total)
            self.bar.bar_format = COUNTED
        for thing in things:
            yield thing
            self.advance()

    def line(self, seconds: float) -> str:
        """Where nobody watches."""
        of = f" of {self.total:,}" if self.total else ""
        count = f", {self.done:,}{of} {self.unit}" if self.done else ""
        return f"{self.what}{count}, for {int(seconds) // 60}:{int(seconds) % 60:02d}"


@contextmanager
def stage(what: str, total: int | None = None, unit: str = "", *, told: bool = True) -> Iterator[Stage]:
    """`what` begins with the name of the stage, as lines do; without a `total` its time is shown.

    `told`: where nobody watches, a line is printed now and then.
    """
    from tqdm import tqdm

    global _bars, _current
    own = _screen is None
    screen = _screen if _screen is not None else _own_screen()
    going, over = Stage(what, unit, total), Event()
    if screen is not None:
        going.bar = tqdm(
            desc=what,
            total=total,
            unit=f" {unit}" if unit else "",
            file=screen,
            leave=False,
            dynamic_ncols=True,
            bar_format=COUNTED if total else COUNTING if unit else WAITING,
        )
        _bars += own
    telling = Thread(target=_tell, args=(going, over), daemon=True)
    if told or going.bar is not None:
        telling.start()
    before, _current = _current, going
    try:
        yield going
    finally:
        _current = before
        over.set()
        if telling.ident is not None:
            telling.join()
        if going.bar is not None:
            going.bar.close()
            _bars -= own


def _own_screen() -> TextIO | None:
    stream = sys.__stdout__
    try:
        return stream if stream is not None and is_screen(stream.fileno()) else None
    except (OSError, ValueError):  # it is closed, or no file
        return None


def _tell(going: Stage, over: Event) -> None:
    began = monotonic()
    while not over.wait(DRAWN_SECONDS if going.bar is not None else TOLD_SECONDS):
        if going.bar is not None:
            going.bar.refresh()
        else:
            sys.stderr.write(f"{going.line(monotonic() - began)}\n")
            sys.stderr.flush()
