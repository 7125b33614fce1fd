"""The stages of an iteration and the data each waits for: the graph that a plan puts in order.

```
policy ── head ── grow ── prune ── verify ── say ── walk ──┬── commit_target ──┬── text
                   ├── (noise) ───────────────┘  │         └── commit_draft ───┘
                   └── (tail) ──────────────────┬┴── (next_head) ──┘
```

In brackets what may run ahead of time, before it is known to be needed:
    noise      the Gumbel noise of every position the tree reaches, while the target verifies; else drawn inside `say`
    tail       the draft's forward over the leaves of the last growth step; else over the accepted one, inside the next `head`
    next_head  the draft's forward over what the target said after each verified node; else over the one root, inside the next `head`
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
    "say": ("verify", "noise"),
    "next_head": ("say", "tail"),
    "walk": ("say",),
    "commit_target": ("walk",),
    "commit_draft": ("walk", "tail", "next_head"),
    # The text is the truth that everything else is rolled back to: it may not run ahead of the target's
    # history.
    "text": ("commit_target", "commit_draft"),
}

AHEAD = ("noise", "tail", "next_head")
"""Stages that exist only where they run ahead of time."""

STAGES = tuple(_NEEDS)
"""Every stage, in an order that respects all data."""

MAIN = tuple(stage for stage in STAGES if stage not in AHEAD)
"""The stages of every iteration, in the order of `Engine.step`."""

SYNCS = ("prune", "walk")
"""Stages in which the host waits for the device."""


def needs(stage: str, ahead: Collection[str] = ()) -> tuple[str, ...]:
    """The stages whose results `stage` reads, when the stages `ahead` run ahead of time.

    Source: Yggdrasil Fig. 9 and section 5.1. Departure: `noise` is ours, the host work of seeded sampling.
    """
    return tuple(need for need in _NEEDS[stage] if need not in AHEAD or need in ahead)
