"""The interface of a model for the step: metadata to fill, a forward of N tokens, and a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor

from yggdrasil.kv import KVCache, KVStorage

__all__ = ["TokenGraphs", "TokenModel"]


class TokenGraphs(Protocol):
    """A model as static graphs over N tokens of any rows.

    Attributes:
        device: "cpu" or "cuda"; metadata lives there.
        max_depth: Longest tree path that metadata can hold.
        sizes: Token counts of the graphs, ascending.
        prefill_chunk: Largest number of tokens in a forward.
        widest: Largest number of tokens in a forward that is not a prompt's.
        num_candidates: C of a draft.
        vocab: V of the pair: columns of a target's logits. A draft proposes tokens below it.
        graph_ms: Milliseconds inside `forward` so far; the rest of a step is host time. On CUDA only the
            launches count.
    """

    device: str
    max_depth: int
    sizes: tuple[int, ...]
    prefill_chunk: int
    widest: int
    num_candidates: int
    vocab: int
    graph_ms: float

    @property
    def cache(self) -> KVStorage:
        """Keys and values of all rows."""
        ...

    def meta(self, num_tokens: int) -> Tensor:
        """The metadata buffer, (bucket, 6 + A) int32, of the smallest graph that holds `num_tokens`.

        Aliasing: every call returns the same buffer.

        Raises:
            ShapeNotCompiled: no graph holds `num_tokens`.
        """
        ...

    def forward(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        """Run the graph of a buffer from `meta`.

        Returns:
            Logits (N, V) and last hidden states (N, E) of a target, or candidates and their
            log-probabilities of a draft, (N, C) or wider, see layout.py. Padding rows are included. In rows
            that are not read only the hidden states are defined.

        Aliasing: on CUDA the next forward of this model, of any size, may overwrite the results.
        """
        ...

    def graph_object(self, meta_NM: Tensor) -> Any | None:
        """The graph of a buffer as an object of kernels/graph.cpp, for C++ steps; None if there is none."""
        ...

    def record_forwards_(self, ms: float, each: Callable[[], Iterable[tuple[int, float, float]]]) -> None:
        """Record the forwards of a C++ step.

        Args:
            ms: Milliseconds of all of them.
            each: Returns the tokens of each, its start and its end, in milliseconds of `time.perf_counter`;
                only until the next step.
        """
        ...


class TokenModel(TokenGraphs, Protocol):
    """Static graphs with the KV cache of a single request.

    The KV of the row is a transaction: forwards write to its provisional indices.
    """

    @property
    def cache(self) -> KVCache:
        """Keys and values of the row."""
        ...
