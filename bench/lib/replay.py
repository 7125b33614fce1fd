"""A target that writes given text at its own speed: the trial of text that the models at hand do not write.

The bundled target was trained on short stories and copies nothing, however it is asked. So its forwards
run as they are, and then the given text's next token gets the largest logit. Every engine and every arm
decodes that text, and drafts, verification and latencies are real.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from yggdrasil.engine import Engine
from yggdrasil.layout import POSITION
from yggdrasil.pair import LoadedPair

__all__ = ["ReplayedTarget", "replayed_pair"]


class ReplayedTarget:
    """A compiled target whose text is given.

    Attributes:
        text: Prompt and answer, in tokens.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self.text: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def graph_object(self, meta_NM: Tensor) -> None:
        """None: the C++ step would read the target's own logits."""
        return

    def forward(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        """The target's forward, with the text's next token in front at every position."""
        logits_NV, hidden_NE = self._target.forward(meta_NM)
        text = torch.tensor(self.text)
        next_N = text[(meta_NM[:, POSITION].long() + 1).clamp(max=len(text) - 1)]
        return torch.zeros_like(logits_NV).scatter_(1, next_N[:, None], 1.0), hidden_NE


def replayed_pair(pair: LoadedPair) -> tuple[LoadedPair, ReplayedTarget]:
    """The pair with a target that writes given text, and that target.

    The step runs in Python, which takes part of a millisecond longer, for all arms alike.
    """
    target = ReplayedTarget(pair.engine.target)
    models: Any = (target, pair.engine.draft)
    return replace(pair, engine=Engine(*models, max_context=pair.engine.max_context)), target
