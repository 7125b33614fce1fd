"""What a person at a terminal sees in addition: colours and drawings, which a file or a pipe never gets."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["console", "is_terminal", "print_dim"]


def is_terminal(stream: TextIO) -> bool:
    """Whether a person reads or types here, on a terminal that moves its cursor."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def console(stream: TextIO) -> Console:
    """Draws on a stream. Cost: imports rich, a twentieth of a second."""
    from rich.console import Console

    return Console(file=stream, highlight=False, soft_wrap=True)


def print_dim(text: str, stream: TextIO, end: str = "\n") -> None:
    """Print a text in a weaker colour, without control characters."""
    from rich.text import Text

    console(stream).print(Text(text, style="dim"), end=end)
    stream.flush()
