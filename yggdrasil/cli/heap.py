"""Keep Python's garbage collector away from what a command loads once and uses to its end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["frozen_heap"]


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Within, collections pass over everything that is alive at its beginning.

    To be entered once the models are loaded: a full collection over what torch imports takes a tenth of a
    second, and would fall into the first step. Thawed at the end, also of an error: what is frozen outlives
    the interpreter, and bindings that count their objects (Triton's) would report leaks."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
