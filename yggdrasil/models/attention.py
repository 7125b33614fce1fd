"""Tree attention as an attention implementation of transformers, so that models run unmodified.

Shapes: P = pages of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

__all__ = [
    "IMPLEMENTATION",
    "AttentionCall",
    "ForwardContext",
    "NoCache",
    "attend_with",
    "recorded_calls",
    "register_attention",
]

IMPLEMENTATION: Final = "yggdrasil"
CHANGING: Final = (
    "attention_mask",
    "block_indices",
    "dropout",
    "indices",
    "position_bias",
    "s_aux",
    "sinks",
    "sliding_window",
    "softcap",
)
"""Options of transformers' attention functions that change the attention when they are set."""


@dataclass(frozen=True)
class ForwardContext:
    """Inputs of a layer's attention apart from its own queries, keys and values.

    Args:
        meta_NM: Row metadata, int32; see layout.py.
        pages_BP: Page table, int32.
        keys: Key cache of every layer, (pages, G, 16, F).
        values: Value caches, of the same shape.
    """

    meta_NM: Tensor
    pages_BP: Tensor
    keys: list[Tensor]
    values: list[Tensor]


@dataclass(frozen=True)
class AttentionCall:
    """One layer's request for attention.

    Args:
        query: Shape of the queries, (1, heads, N, F).
        key: Shape of the keys, (1, G, N, F).
        options: The options of CHANGING that are set.
    """

    layer: int
    query: torch.Size
    key: torch.Size
    value: torch.Size
    options: dict[str, Any]


_current: ContextVar[ForwardContext] = ContextVar("yggdrasil_forward")
_calls: ContextVar[list[AttentionCall] | None] = ContextVar("yggdrasil_calls", default=None)


@contextmanager
def recorded_calls() -> Iterator[list[AttentionCall]]:
    """Record the calls of attention layers in this block, in their order."""
    calls: list[AttentionCall] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


@contextmanager
def attend_with(context: ForwardContext) -> Iterator[None]:
    """Give `context` to the attention layers that this block calls: models do not pass it through."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


class NoCache:
    """A cache for transformers that returns keys and values as they are: `ygg::attend` stores them."""

    is_compileable = True

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def _is_set(option: object) -> bool:
    return isinstance(option, Tensor) or bool(option)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    context = _current.get()
    layer: int = module.layer_idx  # type: ignore[assignment]
    calls = _calls.get()
    if calls is not None:
        given = {**kwargs, "attention_mask": attention_mask}
        options = {name: given[name] for name in CHANGING if _is_set(given.get(name))}
        calls.append(AttentionCall(layer, query.shape, key.shape, value.shape, options))
    scale = kwargs.get("scaling")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    attend = torch.ops.ygg.attend_cuda if query.is_cuda else torch.ops.ygg.attend
    cache = (context.keys[layer], context.values[layer])
    return attend(query, key, value, *cache, context.meta_NM, context.pages_BP, scale), None


def register_attention() -> None:
    """Register the implementation `yggdrasil`; transformers builds no mask for it.

    Transformers builds masks only for implementations with a registered mask function.
    """
    # takes seconds to import, and only the compiler needs it
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _attention)
