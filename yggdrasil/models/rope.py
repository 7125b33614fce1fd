"""Rotary embeddings whose frequencies transformers chooses anew in every forward, by the largest position
in it.
"""

from __future__ import annotations

from torch import nn

__all__ = ["freeze_ropes_"]

FROZEN = "frozen"


def freeze_ropes_(model: nn.Module) -> None:
    """Keep the frequencies of short texts, in place; the context ends before they would change
    (`support.context_limits`).

    A token's embedding must not depend on what runs in the same forward, and a choice by the data is no
    static graph.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            module.rope_type = {layer: _frozen(each) for layer, each in kind.items()}  # type: ignore[assignment]
        elif isinstance(kind, str):
            module.rope_type = _frozen(kind)  # type: ignore[assignment]


def _frozen(kind: str) -> str:
    return FROZEN if "dynamic" in kind or kind == "longrope" else kind
