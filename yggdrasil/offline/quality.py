"""What rounded weights change: the perplexity of the calibration text, before and after.

Shapes: L = tokens of a text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from yggdrasil.models.proof import own_attention
from yggdrasil.models.tokenizer import load_tokenizer

__all__ = ["MOST_SECONDS", "losses", "quality", "token_texts"]

MOST_TEXTS = 32
MOST_TOKENS = 256  # of a text
MOST_SECONDS = 30.0  # for the weights as they were; at least one text is read


def token_texts(model: str, texts: Sequence[str], vocab: int) -> list[Tensor]:
    """The first tokens of the first texts, each (L,); texts of one token have nothing to predict.

    Args:
        model: Folder or hub id with the tokenizer.
        vocab: V of the model; tokens without an embedding are left out.
    """
    tokenizer = load_tokenizer(model)
    read = (tokenizer(text)["input_ids"][:MOST_TOKENS] for text in texts[:MOST_TEXTS])
    known = ([token for token in tokens if token < vocab] for tokens in read)
    return [torch.tensor(tokens) for tokens in known if len(tokens) > 1]


@torch.no_grad()
def losses(model: Any, token_texts: Sequence[Tensor], most_seconds: float = math.inf) -> list[float]:
    """The sum of a text's losses, in nats, for as many texts as the seconds allow.

    Args:
        model: With any linear layers, on the CPU. It is not changed.
    """
    start = time.perf_counter()
    found: list[float] = []
    with own_attention(model):
        for token_L in token_texts:
            logits_LV = model(input_ids=token_L[None], use_cache=False).logits[0].float()
            found.append(float(functional.cross_entropy(logits_LV[:-1], token_L[1:], reduction="sum")))
            if time.perf_counter() - start > most_seconds:
                break
    return found


def quality(
    before: Sequence[float], after: Sequence[float], token_texts: Sequence[Tensor]
) -> dict[str, Any]:
    """`Bundle.quality` from the losses of the same texts before and after rounding."""
    num_tokens = sum(len(token_L) - 1 for token_L in token_texts[: len(before)])
    mean_before, mean_after = (sum(each) / max(1, num_tokens) for each in (before, after))
    return {
        "perplexity": math.exp(mean_after),
        "ratio": math.exp(mean_after - mean_before),
        "tokens": num_tokens,
    }
