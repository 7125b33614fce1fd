"""Freeze rotary embeddings whose frequencies depend on the largest position of a forward."""

from __future__ import annotations

from torch import nn

__all__ = ["freeze_ropes_"]

FROZEN = "frozen"


def freeze_ropes_(model: nn.Module) -> None:
    """Keep the frequencies of short texts, in place.

    A token's embedding must not depend on the other tokens of the forward, and a static graph has no
    data-dependent branch. `support.context_limits` ends the context before the frequencies would change.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            frozen = {layer: _frozen(each) for layer, each in kind.items()}
            module.rope_type = frozen  # type: ignore[assignment]
        elif isinstance(kind, str):
            module.rope_type = _frozen(kind)  # type: ignore[assignment]


def _frozen(kind: str) -> str:
    return FROZEN if "dynamic" in kind or kind == "longrope" else kind
