"""A causal LM as one function of N tokens: the module that is exported at every shape of the menu.

Shapes: P = pages, G = KV heads, S = slots of a page, F = features of a head.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from yggdrasil.kernels.candidates import MOST_CANDIDATES, traced
from yggdrasil.kv import KVStorage
from yggdrasil.layout import POSITION, TOKEN
from yggdrasil.models.attention import ForwardContext, NoCache, attend_with
from yggdrasil.models.rope import freeze_ropes_

__all__ = ["DraftForward", "TargetForward"]


class _TokenForward(nn.Module):
    """Token ids to logits for N tokens, with the KV cache as buffers.

    Buffers become constants of the compiled graph, like the weights, and the caller binds them: all graphs
    of the menu write one cache.

    Args:
        model: A transformers model with tree attention. Its rotary embeddings are frozen in place.
        vocab: V of the pair; logits of the model above it are padding and are dropped.
    """

    def __init__(self, model: Any, cache: KVStorage, vocab: int) -> None:
        super().__init__()
        freeze_ropes_(model)
        self.model = model
        self.vocab = vocab
        # transformers renamed the argument: newer versions warn about the old name
        is_renamed = "cache" in inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if is_renamed else "past_key_values"
        self.num_layers = cache.shape.num_layers
        self.register_buffer("pages", cache.pages_BP)
        for layer in range(self.num_layers):
            key_PGSF, value_PGSF = cache.layer(layer)
            self.register_buffer(f"key_{layer}", key_PGSF)
            self.register_buffer(f"value_{layer}", value_PGSF)

    def logits_and_hidden(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (N, V) and last hidden states (N, E), both in the model's dtype."""
        context = ForwardContext(
            meta_NM,
            self.get_buffer("pages"),
            [self.get_buffer(f"key_{layer}") for layer in range(self.num_layers)],
            [self.get_buffer(f"value_{layer}") for layer in range(self.num_layers)],
        )
        hidden: list[Tensor] = []

        def enter_head(head: nn.Module, args: tuple[Tensor]) -> tuple[Tensor, ...]:
            # the input of the head is the last hidden state in every architecture
            hidden.append(args[0])
            return (args[0], meta_NM) if getattr(head, "takes_meta", False) else args

        hook = self.model.get_output_embeddings().register_forward_pre_hook(enter_head)
        try:
            with attend_with(context):
                token_1N = meta_NM[None, :, TOKEN].long()
                position_1N = meta_NM[None, :, POSITION].long()
                output = self.model(
                    input_ids=token_1N,
                    position_ids=position_1N,
                    use_cache=True,
                    **{self.cache_argument: NoCache()},
                )
        finally:
            hook.remove()
        return output.logits[0, :, : self.vocab], hidden[0][0]


class TargetForward(_TokenForward):
    """N tokens to logits (N, V) and last hidden states (N, E); logits are defined only in read rows."""

    def forward(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        return self.logits_and_hidden(meta_NM)


class DraftForward(_TokenForward):
    """N tokens to the likeliest next tokens of each: one growth step is one call.

    Returns (N, C) int64 tokens and their (N, C) float32 log-probabilities, best first. Only rows with
    READ_WIDE need more than the first `num_candidates`; C is MOST_CANDIDATES, or V if that is less.
    """

    def __init__(self, model: Any, cache: KVStorage, vocab: int, num_candidates: int) -> None:
        super().__init__(model, cache, vocab)
        self.few = num_candidates
        self.count = min(vocab, max(num_candidates, MOST_CANDIDATES))

    def forward(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        logits_NV, _ = self.logits_and_hidden(meta_NM)
        if logits_NV.is_cuda:
            log_probs_NC, tokens_NC = traced(logits_NV, self.count)
        else:
            log_probs_NC, tokens_NC = torch.ops.ygg.candidates(logits_NV, meta_NM, self.count, self.few)
        return tokens_NC, log_probs_NC
