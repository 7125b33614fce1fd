"""The pair without a compiler: the same forwards, operator by operator, with the same protocol."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from yggdrasil.bundle import Bundle
from yggdrasil.compiler.buckets import draft_menu, target_menu
from yggdrasil.engine import Engine
from yggdrasil.kernels import load_cuda_kernels
from yggdrasil.kv import KVCache
from yggdrasil.models.forward import DraftForward, TargetForward
from yggdrasil.models.load import load_config, load_model, shared_vocab
from yggdrasil.models.packing import empty_meta

__all__ = ["EagerModel", "eager_engine"]


class EagerModel:
    """A model of a bundle, run eagerly over its own cache; see yggdrasil/models/protocol.py.

    Linear layers are PyTorch's own: packing is part of the compilation. Shapes follow the tree, no token is
    padded.

    Args:
        is_target: Which of its two models.
    """

    def __init__(self, bundle: Bundle, *, is_target: bool) -> None:
        config = bundle.config
        dtype = getattr(torch, bundle.config.dtype)
        if config.device == "cuda":
            load_cuda_kernels()
        model = load_model(bundle.models[0 if is_target else 1], dtype=dtype).to(config.device)
        self.device = config.device
        self.max_depth = config.path_depth
        self.prefill_chunk = config.prefill_chunk
        self.sizes = (target_menu if is_target else draft_menu)(config).sizes
        self.widest = self.sizes[-2]
        self.num_candidates = 0 if is_target else config.num_candidates
        self.graph_ms = 0.0
        self.cache = KVCache(
            bundle.kv_target if is_target else bundle.kv_draft, dtype=dtype, device=config.device
        )
        self.vocab = shared_vocab(*(load_config(name) for name in bundle.models))
        self._forward = (
            TargetForward(model, self.cache, self.vocab)
            if is_target
            else DraftForward(model, self.cache, self.vocab, config.num_candidates)
        )

    def meta(self, num_tokens: int) -> Tensor:
        return empty_meta(num_tokens, self.max_depth, device=self.device)

    @torch.no_grad()
    def forward(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        start = time.perf_counter()
        outputs: tuple[Tensor, Tensor] = self._forward(meta_NM)
        self.graph_ms += (time.perf_counter() - start) * 1e3
        return outputs

    def graph_object(self, meta_NM: Tensor) -> None:
        """There is no compiled graph."""


def eager_engine(bundle: Bundle) -> Engine:
    """Both models, uncompiled, under the engine's own steps."""
    target, draft = (EagerModel(bundle, is_target=is_target) for is_target in (True, False))
    return Engine(target, draft, max_context=bundle.max_context, eos_tokens=bundle.eos_tokens)
