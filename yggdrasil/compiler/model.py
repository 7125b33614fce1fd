"""A compiled model: the graphs of a menu, packed weights and a KV cache.

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = features of a head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from yggdrasil.compiler.buckets import Menu
from yggdrasil.compiler.graphs import LoadedGraph, ReplayedGraph, full_precision
from yggdrasil.kv import KVCache, KVStorage
from yggdrasil.models.packing import empty_meta

__all__ = ["CompiledModel", "graph_path"]

MOST_CACHED = 96 << 20  # bytes; few cores share a larger cache


def graph_path(folder: Path, num_tokens: int) -> Path:
    """Path of the graph for `num_tokens` in a model's folder of the bundle."""
    return folder / f"tokens_{num_tokens}.pt2"


Storage = TypeVar("Storage", bound=KVStorage)


class CompiledModel(Generic[Storage]):
    """Static graphs that share weights and a cache; implements `TokenGraphs` of models/protocol.py.

    Args:
        folder: Folder of the `tokens_*.pt2` packages.
        weights: Tensors by name, on the device. Aliasing: the graphs read these tensors.
        cache: The KV that the graphs write, of any number of rows and pages.
        num_candidates: C of a draft; 0 for a target.
        command: The command that builds the packages again, for errors.
        captured: On CUDA, replay CUDA graphs; if False, every call launches its kernels one by one.

    Raises:
        ArtifactError: a package is missing or does not load.
    """

    def __init__(
        self,
        folder: Path,
        menu: Menu,
        *,
        weights: dict[str, Tensor],
        cache: Storage,
        device: str,
        max_depth: int,
        num_candidates: int,
        vocab: int,
        command: str,
        captured: bool = True,
    ) -> None:
        self.menu = menu
        self.device = device
        self.max_depth = max_depth
        self.num_candidates = num_candidates
        self.vocab = vocab
        self.sizes = menu.sizes
        self.prefill_chunk = menu.sizes[-1]
        self.widest = menu.sizes[-2:][0]
        self.graph_ms = 0.0
        self.cache = cache
        self.weights = weights
        constants = {**weights, **cache_constants(cache)}
        self._meta = {size: empty_meta(size, max_depth, device=device) for size in menu.sizes}
        is_streamed = self.weight_bytes > MOST_CACHED
        loaded = {
            size: LoadedGraph(graph_path(folder, size), constants, is_streamed, command)
            for size in menu.sizes
        }
        self._graphs: Mapping[int, LoadedGraph | ReplayedGraph] = loaded
        if device == "cuda":
            full_precision()
            if isinstance(cache, KVCache):
                # compiles the kernel now, not in the first step; the slot stays where it is
                torch.ops.ygg.move_slots_(cache.storage_PL2GSF, [0], 0)
            if captured:
                self._graphs = self._capture(loaded)

    def _capture(self, loaded: dict[int, LoadedGraph]) -> dict[int, ReplayedGraph]:
        pool = torch.cuda.graph_pool_handle()
        # smaller graphs reuse the memory of the largest
        largest_first = reversed(loaded.items())
        return {size: ReplayedGraph(graph, self._meta[size], pool) for size, graph in largest_first}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, embeddings included; tied weights count once per name."""
        return sum(tensor.nbytes for tensor in self.weights.values())

    def meta(self, num_tokens: int) -> Tensor:
        return self._meta[self.menu.bucket(num_tokens)]

    def forward(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        """Run the graph of this buffer.

        Aliasing: on CUDA the next forward of any size may overwrite the results.
        """
        start = time.perf_counter()
        outputs = self._graphs[len(meta_NM)](meta_NM)
        self.graph_ms += (time.perf_counter() - start) * 1e3
        return outputs

    def graph_object(self, meta_NM: Tensor) -> Any | None:
        graph = self._graphs[len(meta_NM)]
        # the C++ steps are those of a CPU
        return graph.graph_object if self.device == "cpu" and isinstance(graph, LoadedGraph) else None

    def record_forwards_(self, ms: float, each: Callable[[], Iterable[tuple[int, float, float]]]) -> None:
        self.graph_ms += ms


def cache_constants(cache: KVStorage) -> dict[str, Tensor]:
    """Tensors of the cache by the names of the buffers in models/forward.py."""
    constants = {"pages": cache.pages_BP}
    for layer in range(cache.shape.num_layers):
        constants[f"key_{layer}"], constants[f"value_{layer}"] = cache.layer(layer)
    return constants
