"""Protocol for the progress of a compilation."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

__all__ = ["Progress"]


class Progress(Protocol):
    """Receives the progress of a compilation: one phase at a time, in steps."""

    def phase(self, name: str, total: int) -> AbstractContextManager[Any]:
        """A block during which `advance` counts up to `total`."""
        ...

    def advance(self, count: int = 1) -> None: ...

    def note(self, line: str) -> None:
        """Print a line, such as the expected time of a phase."""
        ...
