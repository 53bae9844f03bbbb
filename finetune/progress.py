"""How far is a long stage? A bar where somebody watches, elsewhere a line now and then. Imports no torch.

A worker's output goes through a process that masks secrets, and from there to the terminal: lines arrive when
they will. So a bar stands alone on the last line, whoever prints a line clears it first (`CLEAR`), and it is
drawn again. A thread draws: a terminal that takes nothing more (Ctrl-S) holds up no step.
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
DRAWN_SECONDS, TOLD_SECONDS, END_SECONDS = 0.2, 30.0, 1.0
"""Between two drawings of a bar, between two lines where there is none; how long a last drawing may take."""
COUNTED, LEFT = "{desc}  {bar:20}  {n_fmt}/{total_fmt}{unit}  {elapsed}", ", {remaining} left"
COUNTING = "{desc}  {n_fmt}{unit}  {elapsed}"
WAITING = "{desc}  {elapsed}"

_screen: TextIO | None = None
"""Where bars are drawn by a process that has sent its output elsewhere."""
_current: Stage | None = None
_bars = 0
"""That are drawn on this process's own terminal."""


def is_screen(descriptor: int) -> bool:
    """A terminal that takes more than plain lines: a bar, or colours."""
    return os.isatty(descriptor) and os.environ.get("TERM", "dumb") != "dumb"


def draw_on(descriptor: int) -> None:
    """Draw bars there from now on: a process that sends its output elsewhere says where its terminal is."""
    global _screen
    _screen = os.fdopen(descriptor, "w", encoding="utf-8", errors="replace", closefd=False)


def columns() -> int:
    """How wide the terminal is; 80 where nobody watches."""
    screen = _screen if _screen is not None else _own_screen()
    try:
        return os.get_terminal_size(screen.fileno()).columns if screen is not None else 80
    except OSError:
        return 80


def current() -> Stage | None:
    """The stage that goes on."""
    return _current


def clearing() -> str:
    """What a line of this process begins with while it draws a bar."""
    return CLEAR if _bars else ""


def tell(line: str) -> None:
    """Print a line, above the bar if there is one."""
    sys.stdout.write(f"{clearing()}{line}\n")
    sys.stdout.flush()


@dataclass(slots=True)
class Stage:
    """A stage that goes on."""

    what: str
    unit: str
    total: int | None = None
    done: int = 0
    before: int = 0
    """What was done already when it was begun."""
    end: float | None = None
    """When it is expected to be over (`monotonic`), by somebody who knows more than how much is done."""

    def of(self, total: int, before: int = 0) -> None:
        """There is so much to do, and so much of it has been done."""
        self.total, self.done, self.before = total, before, before

    def advance(self, number: int = 1) -> None:
        """So much more is done."""
        self.done += number

    def ends_in(self, seconds: float) -> None:
        """It will be over in so long."""
        self.end = monotonic() + seconds

    def over(self, things: Collection[Any]) -> Iterator[Any]:
        """Count them as they are taken."""
        self.of(len(things))
        for thing in things:
            yield thing
            self.advance()

    def line(self, seconds: float) -> str:
        """Where nobody watches."""
        of = f" of {self.total:,}" if self.total else ""
        count = f", {self.done:,}{of} {self.unit}".rstrip() if self.done else ""
        return f"{self.what}{count}, for {clock(seconds)}"


def clock(seconds: float) -> str:
    """2:03, or 1:02:03; what is overdue takes no time."""
    hours, rest = divmod(max(int(seconds), 0), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


@contextmanager
def stage(what: str, unit: str = "", *, told: bool = True) -> Iterator[Stage]:
    """`what` begins with the name of the stage, as lines do; until something is counted its time is shown.

    `told`: where nobody watches, a line is printed now and then.
    """
    global _bars, _current
    own = _screen is None
    screen = _own_screen() if own else _screen
    going, over = Stage(what, unit), Event()
    work = _draw if screen is not None else _tell
    telling = Thread(target=work, args=(going, over, screen or sys.stderr), daemon=True)
    if told or screen is not None:
        telling.start()
    before, _current = _current, going
    _bars += own and screen is not None
    try:
        yield going
    finally:
        _current = before
        over.set()
        if telling.ident is not None:
            telling.join(timeout=END_SECONDS)
        _bars -= own and screen is not None


def _own_screen() -> TextIO | None:
    stream = sys.__stdout__
    try:
        return stream if stream is not None and is_screen(stream.fileno()) else None
    except (OSError, ValueError):  # it is closed, or no file
        return None


def _draw(going: Stage, over: Event, screen: TextIO) -> None:
    from tqdm import tqdm

    bar = tqdm(desc=going.what, file=screen, leave=False, dynamic_ncols=True, bar_format=WAITING)
    while not over.wait(DRAWN_SECONDS):
        bar.n, bar.total, bar.initial = going.done, going.total, going.before
        bar.unit = f" {going.unit}" if going.unit else ""
        counted = COUNTED + (f", {clock(going.end - monotonic())} left" if going.end is not None else LEFT)
        bar.bar_format = counted if going.total else COUNTING if going.done else WAITING
        bar.refresh()
    bar.close()


def _tell(going: Stage, over: Event, stream: TextIO) -> None:
    began = monotonic()
    while not over.wait(TOLD_SECONDS):
        stream.write(f"{going.line(monotonic() - began)}\n")
        stream.flush()
