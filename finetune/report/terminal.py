"""What can the terminal show? The standard library is enough: `doctor --quick` asks, too."""

from __future__ import annotations

import os
import shutil
import sys

from finetune.report.shown import WIDTH


def line_width() -> int:
    """Characters of a line: the terminal's, and never fewer than `WIDTH`, which tables need."""
    return max(shutil.get_terminal_size().columns, WIDTH)


def takes_colour() -> bool:
    """Whether stdout is a terminal that shows colours, and nobody has asked for none (https://no-color.org)."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")
