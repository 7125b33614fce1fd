"""A plan: the stages of a step, which of them run ahead of time, in which order, and where.

```
draft ─ prune ─ verify ─ choose ─ accept ─ commit
  ├─ (noise) ──────────────┘ │              │
  └─ (tail) ───────────────┬─┴ (next_head) ─┤
                           └────────────────┘
```

`choose` computes the target's own token after every node; `accept` walks down the tree along them. Stages
in brackets may run ahead of time, before it is known whether they are needed:
    noise      draws the Gumbel noise of every position that these trees and the next ones reach, while the
               target verifies; otherwise `draft` and `choose` draw it
    tail       the draft's forward over the leaves of the last growth step; otherwise the next `draft` runs
               it, over the accepted leaf only
    next_head  the draft's forward over the target's token after each verified node; otherwise the next
               `draft` runs it, over the one root
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from yggdrasil.errors import ConfigError

__all__ = ["AHEAD", "MAIN", "RESOURCES", "SEQUENTIAL", "STAGES", "SYNCS", "Placement", "Plan", "needs"]

_NEEDS: Mapping[str, tuple[str, ...]] = {
    "draft": (),
    "noise": ("draft",),
    "tail": ("draft",),
    "prune": ("draft",),
    "verify": ("prune",),
    "choose": ("verify", "noise"),
    "next_head": ("choose", "tail"),
    "accept": ("choose",),
    "commit": ("accept", "tail", "next_head"),
}

AHEAD = ("noise", "tail", "next_head")
"""Stages that exist only when they run ahead of time."""

STAGES = tuple(_NEEDS)
"""Every stage, in an order that respects all dependencies."""

MAIN = tuple(stage for stage in STAGES if stage not in AHEAD)
"""The stages of every step."""

SYNCS = ("prune", "accept")
"""Stages in which the host waits for the device."""

RESOURCES = ("main", "side")
"""The calling thread and one worker thread; on CUDA the calling thread's stream and a second stream."""

# stages that have less or other work when one of these stages ran ahead of time
_REDUCED_BY = {"draft": ("next_head", "tail"), "choose": ("noise",), "commit": ("next_head",)}


def needs(stage: str, ahead: Collection[str] = ()) -> tuple[str, ...]:
    """The stages whose results `stage` reads, when the stages `ahead` run ahead of time.

    Source: Yggdrasil Fig. 9 and section 5.1. Departure: `noise`, host work of seeded sampling, is added.
    """
    return tuple(need for need in _NEEDS[stage] if need not in AHEAD or need in ahead)


@dataclass(frozen=True)
class Placement:
    """One stage on one resource."""

    stage: str
    resource: str = "main"


@dataclass(frozen=True)
class Plan:
    """A step: its stages in the calling thread's order, which runs "main" and hands over "side".

    Args:
        placements: Every stage of `MAIN` once, on "main", and any of `AHEAD` once, each after the stages
            that it needs.

    Raises:
        ConfigError: a stage or resource that does not exist, is missing, comes twice, comes before a stage
            that it needs, or may not run on "side".

    Example:
        >>> from yggdrasil.step.plan import SEQUENTIAL, Plan
        >>> SEQUENTIAL.ahead
        ()
        >>> order = SEQUENTIAL.order
        >>> Plan.of("tail during verification", [*order[:1], ("tail", "side"), *order[1:]]).ahead
        ('tail',)

    Source: Yggdrasil section 5.2.
    """

    name: str
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        self._check_stages()
        if "next_head" in self.ahead and "tail" not in self.ahead:
            raise ConfigError(
                "plan", self.name, "with tail ahead of time: next_head needs the KV of every leaf"
            )
        ready: set[str] = set()
        for stage in self.order:
            for need in needs(stage, self.ahead):
                if need not in ready:
                    raise ConfigError(
                        f"place of {stage}", f"before {need}", f"after {need}, whose result it reads"
                    )
            ready.add(stage)

    def _check_stages(self) -> None:
        for place in self.placements:
            if place.stage not in STAGES:
                raise ConfigError("stage", place.stage, f"one of {STAGES}")
            if place.resource not in RESOURCES:
                raise ConfigError(f"resource of {place.stage}", place.resource, f"one of {RESOURCES}")
            if place.resource == "side" and place.stage not in AHEAD:
                raise ConfigError(
                    f"resource of {place.stage}", "side", f"main: only {AHEAD} may leave the calling thread"
                )
        for stage in STAGES:
            count = self.order.count(stage)
            if count > 1 or (count == 0 and stage in MAIN):
                raise ConfigError(f"placements of {stage}", count, "1" if stage in MAIN else "0 or 1")

    @classmethod
    def of(cls, name: str, order: Sequence[str | tuple[str, str]]) -> Plan:
        """A plan from stages; a pair names the resource, a bare stage runs on "main"."""
        entries = ((entry,) if isinstance(entry, str) else entry for entry in order)
        return cls(name, tuple(Placement(*entry) for entry in entries))

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The names of the stages, in order."""
        return tuple(place.stage for place in self.placements)

    @cached_property
    def ahead(self) -> tuple[str, ...]:
        """The stages that run ahead of time."""
        return tuple(stage for stage in AHEAD if stage in self.order)

    @cached_property
    def on_side(self) -> tuple[str, ...]:
        """The stages on "side", in order."""
        return tuple(place.stage for place in self.placements if place.resource == "side")

    def helps(self, temperature: float) -> bool:
        """Whether any stage runs ahead of time at this temperature: at 0 there is no noise to draw."""
        return self.ahead != () and (temperature > 0 or self.ahead != ("noise",))

    def form(self, stage: str) -> str:
        """The name under which the stage's milliseconds are measured.

        A stage's work depends on where it runs and on what ran ahead of time.
        """
        if stage in AHEAD:
            return f"{stage} on {'side' if stage in self.on_side else 'main'}"
        reduced_by = next(
            (earlier for earlier in _REDUCED_BY.get(stage, ()) if earlier in self.ahead), None
        )
        return stage if reduced_by is None else f"{stage} after {reduced_by}"

    @classmethod
    def from_json(cls, payload: Mapping[str, Any]) -> Plan:
        """The inverse of `asdict`. Raises ConfigError, KeyError or TypeError for an invalid plan."""
        return cls(payload["name"], tuple(Placement(**placement) for placement in payload["placements"]))


SEQUENTIAL = Plan.of("sequential", MAIN)
"""One stage after another; none runs ahead of time."""
