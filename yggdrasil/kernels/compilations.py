"""Count compilations, and forbid them in the decode loop."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["compilations", "count_compilation", "no_compilation"]

_count = 0
_forbidden = False


def count_compilation() -> None:
    """Count one built graph or library; raises RuntimeError inside `no_compilation`."""
    global _count
    if _forbidden:
        raise RuntimeError(
            "compilation inside the decode loop: every shape must come from the compiled menu"
        )
    _count += 1


def compilations() -> int:
    """Graphs and libraries built for this process, with those that Dynamo compiled by itself."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return _count + (dynamo.counters["stats"]["unique_graphs"] if dynamo else 0)


@contextmanager
def no_compilation() -> Iterator[None]:
    """A block in which building a graph raises, and so does a recompilation by Dynamo, if it is loaded."""
    global _forbidden
    previous = _forbidden
    _forbidden = True
    try:
        if "torch._dynamo" in sys.modules:
            import torch

            with torch.compiler.set_stance("fail_on_recompile"):
                yield
        else:
            yield
    finally:
        _forbidden = previous
