"""What may follow a text because it repeats, in C++; text/repeats.py has the specification."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from yggdrasil.kernels.build import kernel_library
from yggdrasil.text.repeats import Graft, Repeats

__all__ = ["graft"]


def graft(repeats: Repeats, most: int, min_edge: float = 0.0) -> Graft:
    """`Repeats.graft`. Cost: microseconds for a thousand tokens."""
    tokens = (most * ctypes.c_int64)()
    log_probs = (most * ctypes.c_double)()
    address, length = repeats.tokens.buffer_info()
    found = _graft()(address, length, ctypes.byref(repeats.evidence), most, min_edge, tokens, log_probs)
    return Graft(tuple(tokens[:found]), tuple(log_probs[:found]))


@cache
def _graft() -> Any:
    library: Any = kernel_library()
    call = library.ygg_graft
    pointer = ctypes.c_void_p
    call.argtypes = [*(pointer, ctypes.c_int64) * 2, ctypes.c_double, pointer, pointer]
    call.restype = ctypes.c_int64
    return call
