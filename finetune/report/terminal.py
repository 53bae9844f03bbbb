"""What can the terminal show? The standard library is enough: `doctor --quick` asks, too."""

from __future__ import annotations

import os
import shutil

from finetune.progress import is_screen
from finetune.report.shown import WIDTH


def line_width() -> int:
    """Characters of a line: the terminal's, and never fewer than `WIDTH`, which tables need."""
    return max(shutil.get_terminal_size().columns, WIDTH)


def takes_colour() -> bool:
    """Whether stdout is a terminal that shows colours, and nobody has asked for none (https://no-color.org)."""
    return is_screen(1) and not os.environ.get("NO_COLOR")
