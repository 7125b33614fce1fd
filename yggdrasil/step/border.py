"""The border between Python and kernels/step.cpp: its structs, field by field, and its entry points."""

from __future__ import annotations

import ctypes
import struct
from collections import namedtuple
from functools import lru_cache, partial
from typing import Any

from yggdrasil.kernels import kernel_library
from yggdrasil.step.choice import VerifyMenu

__all__ = [
    "FORWARD",
    "MASK",
    "RESULT",
    "ROW",
    "TIMES_MS",
    "Calls",
    "ForwardStruct",
    "MenuStruct",
    "PromptStruct",
    "ReplyStruct",
    "ResultStruct",
    "RowStruct",
    "menu_struct",
]


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


_pointers = partial(_fields, ctypes.c_void_p)
_ints = partial(_fields, ctypes.c_int64)
_floats = partial(_fields, ctypes.c_double)


# The structs of kernels/step.h, which explains them.

MASK = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64), ctypes.c_int64)


class RowStruct(ctypes.Structure):
    _fields_ = [
        *_pointers("tokens evidence forced"),
        *_ints("len place target_len draft_len width depth verify calibration stop levels graft"),
        *_ints("num_forced top_k seed processors prompt_len grammar inspect"),
        *_floats("temperature top_p min_p top_logit"),
    ]


class PromptStruct(ctypes.Structure):
    _fields_ = [*_pointers("tokens"), *_ints("len start place")]


class MenuStruct(ctypes.Structure):
    _fields_ = [*_pointers("nodes ms extra"), *_ints("len"), *_floats("growth_ms scale")]


class ResultStruct(ctypes.Structure):
    _fields_ = [
        *_pointers("hidden"),
        *_ints("hidden_bytes"),
        *_ints("drafted depth verified root_at target_len draft_len path_len ids_at words_at values_at"),
        *_floats("expected top_logit"),
    ]


class ForwardStruct(ctypes.Structure):
    _fields_ = [*_ints("model num_tokens"), *_floats("begin_ms end_ms")]


class ReplyStruct(ctypes.Structure):
    _fields_ = [
        *_pointers("results ids words values forwards mask"),
        *_ints("max_results max_ids max_words max_values max_forwards vocab num_tokens num_forwards"),
        ("draft_ms", 5 * ctypes.c_double),
        ("verify_ms", 4 * ctypes.c_double),
        ("graph_ms", 2 * ctypes.c_double),
        ("error", 512 * ctypes.c_char),
    ]


STRUCTS: tuple[type[ctypes.Structure], ...] = (
    RowStruct,
    PromptStruct,
    MenuStruct,
    ResultStruct,
    ForwardStruct,
    ReplyStruct,
)


CODES = {ctypes.c_void_p: "P", ctypes.c_int64: "q", ctypes.c_double: "d"}


class Times:
    """The times of a reply in milliseconds, in one call: `draft_ms`, `verify_ms` and `graph_ms`."""

    def __init__(self) -> None:
        self._struct = struct.Struct("11d")
        self._offset: int = ReplyStruct.draft_ms.offset

    def read(self, reply: ReplyStruct) -> tuple[float, ...]:
        return self._struct.unpack_from(reply, self._offset)


class Fields:
    """All fields of a struct in one call; after a forward, ctypes takes microseconds for each."""

    def __init__(self, kind: type[ctypes.Structure]) -> None:
        fields: Any = kind._fields_
        self._struct = struct.Struct("".join(CODES[code] for _, code in fields))
        self._named: Any = namedtuple(kind.__name__, [name for name, *_ in fields])  # type: ignore[misc]

    def write_(self, array: Any, place: int, *values: float) -> None:
        """Write the struct at a place of an array of them; values are in the order of the fields."""
        self._struct.pack_into(array, place * self._struct.size, *values)

    def read(self, array: Any, place: int) -> Any:
        """The struct at a place of an array of them, by names."""
        return self._named._make(self._struct.unpack_from(array, place * self._struct.size))


ROW = Fields(RowStruct)
RESULT = Fields(ResultStruct)
FORWARD = Fields(ForwardStruct)
TIMES_MS = Times()


class Calls:
    """The C entry points of kernels/step.h for one step.

    Raises:
        RuntimeError: at a call that fails in C++, with its message.
    """

    def __init__(self, address: int) -> None:
        self._address = address
        library: Any = kernel_library()
        sizes = (len(STRUCTS) * ctypes.c_int64)()
        library.ygg_step_bytes(sizes)
        assert [*sizes] == [ctypes.sizeof(struct) for struct in STRUCTS], "structs differ from step.h"
        rows = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        self._draft = library.ygg_step_draft
        self._run = library.ygg_step_run
        self._verify = library.ygg_step_verify
        self._draft.argtypes = self._run.argtypes = [*rows, ctypes.c_void_p, ctypes.c_void_p]
        self._verify.argtypes = [*rows, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        for call in (self._draft, self._run, self._verify):
            call.restype = ctypes.c_int64

    def draft(self, rows: Any, num_rows: int, menu: MenuStruct, reply: ReplyStruct) -> None:
        _check(self._draft(self._address, rows, num_rows, ctypes.byref(menu), ctypes.byref(reply)), reply)

    def run(self, rows: Any, num_rows: int, menu: MenuStruct, reply: ReplyStruct) -> None:
        _check(self._run(self._address, rows, num_rows, ctypes.byref(menu), ctypes.byref(reply)), reply)

    def verify(self, rows: Any, num_rows: int, prompts: Any, num_prompts: int, reply: ReplyStruct) -> None:
        status = self._verify(self._address, rows, num_rows, prompts, num_prompts, ctypes.byref(reply))
        _check(status, reply)


def _check(status: int, reply: ReplyStruct) -> None:
    if status < 0:
        raise RuntimeError(reply.error.decode(errors="replace"))


@lru_cache(maxsize=64)
def menu_struct(menu: VerifyMenu) -> MenuStruct:
    """The menu's struct; it keeps its arrays alive."""
    count = len(menu.nodes)
    struct = MenuStruct(len=count, growth_ms=menu.growth_ms, scale=menu.scale)
    struct.arrays = [(count * ctypes.c_int64)(*menu.nodes), (count * ctypes.c_double)(*menu.ms)]
    struct.nodes, struct.ms = map(ctypes.addressof, struct.arrays)
    if menu.extra:
        struct.arrays.append((count * ctypes.c_double)(*menu.extra))
        struct.extra = ctypes.addressof(struct.arrays[-1])
    return struct
