"""Keep Python's garbage collector away from objects that live as long as the command."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["frozen_heap"]


@contextmanager
def frozen_heap() -> Iterator[None]:
    """A block in which the garbage collector skips all objects that exist at its beginning.

    Enter it after the models are loaded: a full collection over what torch imports takes a tenth of a
    second, and would happen in the first step. The heap is always thawed at the end: frozen objects outlive
    the interpreter, and bindings that count their objects (Triton's) would report leaks.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
