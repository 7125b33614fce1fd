"""A pretended CUDA device: its tensors, and a record of every call for which the host would wait.

A `Pretended` tensor holds its values in an ordinary tensor, on which every operator runs. A call waits
under the same conditions as in torch: it reads values, its shape depends on values, or it copies between
host and device, unless the host's memory is pinned and the copy is non-blocking. Assigning a number to a
single element or through an index is such a copy, from pageable memory; assigning it to a slice is a fill.

Time is pretended, too: the host's work takes none, a forward of a `DeviceModel` takes a given time on its
stream, and a wait ends when the awaited work ends.

Of our own operators the form for CUDA runs, where there is one in Python.

For torch itself the tensors are on its "meta" device, which every build has.
"""

from __future__ import annotations

import linecache
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

import yggdrasil
from yggdrasil.models.protocol import TokenModel
from yggdrasil.trace import Trace

PACKAGE = str(Path(yggdrasil.__file__).parent)
READS = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::is_nonzero",
    "aten::_unique2",
    "aten::unique_dim",
)
INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class Sync(NamedTuple):
    """A call that waits.

    Args:
        stage: Stage of the step, empty outside a step.
        path: The innermost file of the package in the call stack.
    """

    stage: str
    what: str
    path: str
    line: int

    @property
    def is_explained(self) -> bool:
        """Whether a comment on the line explains the wait."""
        return "# sync: " in linecache.getline(self.path, self.line)


class Pretended(torch.Tensor):
    """A tensor of the device; `host` holds the values."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> Pretended:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device("meta"),
        )
        tensor.host = host
        return tensor

    def __init__(self, host: Tensor) -> None: ...

    device = property(lambda self: torch.device("cuda", 0))
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def tolist(self) -> Any:
        """`tolist`, which torch refuses for subclasses; on a device it is a copy to the host."""
        _note("tolist")
        return self.host.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "ygg" and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CUDA"):
            return func._op_dk(torch._C.DispatchKey.CUDA, *args, **kwargs)
        if _waits(func, args, kwargs):
            _note(func.name())
        to_device = kwargs.get("device")
        kwargs = {**kwargs, "device": torch.device("cpu")} if to_device is not None else kwargs
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Pretended)]
        out = func(*tree_map(_host, args), **tree_map(_host, kwargs))
        # a copy to the host
        stays = to_device is not None and torch.device(to_device).type == "cpu"

        def wrapped(value: Any) -> Any:
            if not isinstance(value, Tensor) or stays:
                return value
            # an in-place operator returns its argument
            same = [tensor for tensor in given if tensor.host is value]
            return same[0] if same else Pretended(value)

        into_host = func.name() == "aten::copy_" and not isinstance(args[0], Pretended)
        return args[0] if into_host else tree_map(wrapped, out)


def _host(value: Any) -> Any:
    return value.host if isinstance(value, Pretended) else value


def _waits(func: Any, args: Any, kwargs: Any) -> bool:
    name = func.name().partition(".")[0]
    if name == "aten::copy_":
        target, source = args[:2]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return isinstance(target, Pretended) != isinstance(source, Pretended) and not (
            non_blocking and _is_pinned(_host_side(target, source))
        )
    if name == "aten::_to_copy":
        return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
    if name in INDEXING:
        indices = [index for index in args[1] if index is not None]
        from_host = [
            index
            for index in (*indices, *args[2:3])
            if isinstance(index, Tensor) and not isinstance(index, Pretended)
        ]
        return bool(from_host) or any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    strangers = [
        leaf
        for leaf in tree_flatten((args, kwargs))[0]
        if isinstance(leaf, Tensor) and not isinstance(leaf, Pretended) and leaf.dim() > 0
    ]
    assert not strangers, f"{func} mixes tensors of the device and of the host: CUDA refuses that"
    return name in READS


def _host_side(target: Tensor, source: Tensor) -> Tensor:
    return source if isinstance(target, Pretended) else target


_pinned: list[Tensor] = []
_syncs: list[Sync] = []
_stage = ""


def _is_pinned(host: Tensor) -> bool:
    return any(
        host.untyped_storage().data_ptr() == pinned.untyped_storage().data_ptr() for pinned in _pinned
    )


def _note(what: str) -> None:
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back  # type: ignore[assignment]
    _syncs.append(
        Sync(_stage, what, frame.f_code.co_filename if frame else "", frame.f_lineno if frame else 0)
    )
    Stream.current.synchronize()


class Host:
    """The clock of the host: only `sleep` and waits advance it."""

    now = 0.0

    @staticmethod
    def perf_counter() -> float:
        return Host.now

    @staticmethod
    def sleep(seconds: float) -> None:
        Host.now += seconds


class Event:
    """The time at which a stream finishes the work that it had been given."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = max(Stream.current.done, Host.now)

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


class Stream:
    """Work that takes time and runs in order; the host continues unless it waits."""

    current: Stream
    all: list[Stream]

    def __init__(self) -> None:
        self.done = 0.0
        Stream.all.append(self)

    def give(self, ms: float) -> None:
        self.done = max(self.done, Host.now) + ms / 1e3

    def synchronize(self) -> None:
        Host.now = max(Host.now, self.done)

    def wait_stream(self, other: Stream) -> None:
        self.done = max(self.done, other.done)

    def wait_event(self, event: Event) -> None:
        self.done = max(self.done, event.at)

    def record_event(self) -> Event:
        event = Event()
        event.record()
        return event


Stream.all = []
Stream.current = Stream()


@contextmanager
def _on_stream(stream: Stream) -> Iterator[None]:
    before = Stream.current
    Stream.current = stream
    try:
        yield
    finally:
        Stream.current = before


def _synchronize() -> None:
    for stream in Stream.all:
        stream.synchronize()


CUDA: dict[str, Any] = {
    "Event": Event,
    "Stream": Stream,
    "current_stream": lambda: Stream.current,
    "stream": _on_stream,
    "synchronize": _synchronize,
}
"""Replacements in torch.cuda for streams and time."""


class _Bindings(TorchFunctionMode):
    """Replacements for torch functions that make tensors on a device, pin memory, or copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.pin_memory or kwargs.pop("pin_memory", False):
            _pinned.append(args[0].clone() if func is torch.Tensor.pin_memory else func(*args, **kwargs))
            return _pinned[-1]
        if func is torch.Tensor.to:
            return self._to(*args, **kwargs)
        if func is torch.Tensor.__setitem__ and isinstance(args[0], Pretended):
            return _assign_(*args)
        if _is_device(kwargs.get("device")):
            if func is torch.tensor:
                _note("tensor")  # from a list, through pageable memory
            return Pretended(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)

    @staticmethod
    def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device = next(
            (value for value in (*args, kwargs.get("device")) if isinstance(value, torch.device | str)),
            None,
        )
        if isinstance(tensor, Pretended) or not _is_device(device):
            return tensor.to(*args, **kwargs)
        if not (kwargs.get("non_blocking", False) and _is_pinned(tensor)):
            _note("to")
        return Pretended(tensor.clone())


def _assign_(target: Pretended, index: Any, value: Any) -> None:
    places = index if isinstance(index, tuple) else (index,)
    into_one = len(places) == target.dim() and all(isinstance(place, int) for place in places)
    by_index = any(isinstance(place, Tensor | list) for place in places)
    is_mask = any(isinstance(place, Tensor) and place.dtype == torch.bool for place in places)
    if not isinstance(value, Pretended) and (isinstance(value, Tensor) or into_one or by_index):
        _note("a number assigned")
    elif is_mask:
        _note("a mask")
    target.host[tree_map(_host, index)] = _host(value)


def _is_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


@contextmanager
def pretended_device() -> Iterator[list[Sync]]:
    """A block in which "cuda" is a device; yields the list of syncs, which the block may clear."""
    _syncs.clear()
    _pinned.clear()
    Stream.all = []
    Stream.current = Stream()
    with _Bindings(), ExitStack() as patched:
        for name, ours in CUDA.items():
            patched.enter_context(patch.object(torch.cuda, name, ours))
        for name in ("perf_counter", "sleep"):
            patched.enter_context(patch.object(time, name, getattr(Host, name)))
        yield _syncs


class StageNames(Trace):
    """A trace that gives the record the name of the running stage."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        global _stage
        _stage = name
        try:
            yield
        finally:
            _stage = ""


class DeviceModel:
    """A compiled CPU model with the protocol of one on CUDA; see yggdrasil/models/protocol.py.

    Metadata and outputs are on the device. As with captured graphs, which share memory, a forward
    overwrites the outputs of the one before. The cache stays on the host, so its moves are not recorded.

    Args:
        model: Runs the forwards immediately.
        forward_ms: Pretended time of a forward.
    """

    def __init__(self, model: TokenModel, forward_ms: float = 0.0) -> None:
        self._forward_ms = forward_ms
        self.cache = model.cache
        self.max_depth = model.max_depth
        self.sizes = model.sizes
        self.prefill_chunk = model.prefill_chunk
        self.widest = model.widest
        self.num_candidates = model.num_candidates
        self.vocab = model.vocab
        self.graph_ms = 0.0
        self.device = "cuda"
        self._model = model
        self._last: tuple[Tensor, ...] = ()

    def meta(self, num_tokens: int) -> Tensor:
        return Pretended(self._model.meta(num_tokens))

    def graph_object(self, meta_NM: Tensor) -> None:
        """C++ runs no graph of a device."""

    def forward(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        for tensor in self._last:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
        self._last = self._model.forward(_host(meta_NM))
        Stream.current.give(self._forward_ms)
        first, second = map(Pretended, self._last)
        return first, second
