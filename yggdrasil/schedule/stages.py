"""The stages of an iteration and the data each waits for: the graph that a plan puts in order.

```
policy ─ head ─ grow ─ prune ─ verify ─ target_tokens ─ walk ─┬─ commit_target ─┬─ text
                 ├─ (noise) ─────────────┘  │                 └─ commit_draft ──┘
                 └─ (tail) ────────────────┬┴─ (next_head) ──────┤
                                           └─────────────────────┘
```

Stages in brackets may run ahead of time, before it is known whether they are needed:
    noise      draws the Gumbel noise of every position that the tree reaches, while the target verifies;
               otherwise `target_tokens` draws it
    tail       the draft's forward over the leaves of the last growth step; otherwise the next `head` runs
               it, over the accepted leaf only
    next_head  the draft's forward over the target's token after each verified node; otherwise the next
               `head` runs it, over the one root
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

__all__ = ["AHEAD", "MAIN", "STAGES", "SYNCS", "needs"]

_NEEDS: Mapping[str, tuple[str, ...]] = {
    "policy": (),
    "head": ("policy",),
    "grow": ("head",),
    "noise": ("grow",),
    "tail": ("grow",),
    "prune": ("grow",),
    "verify": ("prune",),
    "target_tokens": ("verify", "noise"),
    "next_head": ("target_tokens", "tail"),
    "walk": ("target_tokens",),
    "commit_target": ("walk",),
    "commit_draft": ("walk", "tail", "next_head"),
    # Everything else is rolled back to the text, so the text must not be ahead of the target's KV.
    "text": ("commit_target", "commit_draft"),
}

AHEAD = ("noise", "tail", "next_head")
"""Stages that exist only when they run ahead of time."""

STAGES = tuple(_NEEDS)
"""Every stage, in an order that respects all dependencies."""

MAIN = tuple(stage for stage in STAGES if stage not in AHEAD)
"""The stages of every iteration, in the order of `Engine.step`."""

SYNCS = ("prune", "walk")
"""Stages in which the host waits for the device."""


def needs(stage: str, ahead: Collection[str] = ()) -> tuple[str, ...]:
    """The stages whose results `stage` reads, when the stages `ahead` run ahead of time.

    Source: Yggdrasil Fig. 9 and section 5.1. Departure: `noise`, host work of seeded sampling, is added.
    """
    return tuple(need for need in _NEEDS[stage] if need not in AHEAD or need in ahead)
