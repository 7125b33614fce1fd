"""What the step needs of a model: fill metadata, run N tokens, keep or forget their KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from yggdrasil.kv import KVCache

__all__ = ["TokenGraphs", "TokenModel"]


class TokenGraphs(Protocol):
    """A model as static graphs over N tokens of any rows.

    Attributes:
        device: Where metadata lives.
        max_depth: Longest tree path that metadata can hold.
        sizes: Tokens of every graph, ascending.
        prefill_chunk: Most tokens of one forward.
        widest: Most tokens of a forward that is not a prompt's.
        num_candidates: C, of a draft.
        graph_ms: Milliseconds spent inside `forward` so far: the rest of a step is the host's. On CUDA
            of the launches alone.
    """

    device: str
    max_depth: int
    sizes: tuple[int, ...]
    prefill_chunk: int
    widest: int
    num_candidates: int
    graph_ms: float

    def meta(self, num_tokens: int) -> Tensor:
        """The metadata buffer, (bucket, 6 + A) int32, of the smallest graph for `num_tokens`. Aliasing: the
        same one every time.
        """
        ...

    def forward(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        """Run the graph of that buffer: (logits, hidden) of a target, (tokens, log-probabilities) of a
        draft, padding rows included.

        Rows that the metadata does not mark as read have a hidden state; their other outputs are not
        defined.

        Aliasing: on CUDA the next forward of this model, of whatever size, may write over the results.
        """
        ...

    def native(self, meta_NM: Tensor) -> Any | None:
        """The graph of that buffer as an object of kernels/graph.cpp, for loops that run it there; None
        where a forward is anything else.
        """
        ...

    def record_forward_(self, num_tokens: int, times_ms: Sequence[float]) -> None:
        """Record forwards of `num_tokens` tokens that such a loop ran: start and end of each, by
        `time.perf_counter`.
        """
        ...


class TokenModel(TokenGraphs, Protocol):
    """The same with the cache of a single request.

    Attributes:
        cache: Its KV; forwards write provisional indices.
    """

    cache: KVCache
