"""A plan: which stages run ahead of time, in which order, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from yggdrasil.errors import ConfigError
from yggdrasil.schedule.stages import AHEAD, MAIN, STAGES, needs

__all__ = ["RESOURCES", "SEQUENTIAL", "Placement", "Plan"]

RESOURCES = ("main", "side")
"""The calling thread and one worker beside it; on CUDA the calling thread's stream and a second one."""

# stages with less, or other, work left
_EASED = {"head": ("next_head", "tail"), "say": ("noise",), "commit_draft": ("next_head",)}


@dataclass(frozen=True)
class Placement:
    """One stage on one resource."""

    stage: str
    resource: str = "main"


@dataclass(frozen=True)
class Plan:
    """An iteration, in the order in which the calling thread comes to its stages: it runs those of "main"
    and hands over those of "side".

    Args:
        name: For people.
        placements: Every stage of `MAIN` once, on "main", and any of `AHEAD` once, each after what it
            needs.

    Raises:
        ConfigError: a stage or resource that does not exist, is missing or comes twice, stands before what
            it needs, or is not for "side".

    Example:
        >>> from yggdrasil.schedule.plan import SEQUENTIAL, Plan
        >>> SEQUENTIAL.ahead
        ()
        >>> Plan.of("tail beside verification", [*SEQUENTIAL.order[:3], ("tail", "side"), *SEQUENTIAL.order[3:]]).ahead
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
        return cls(
            name,
            tuple(Placement(entry) if isinstance(entry, str) else Placement(*entry) for entry in order),
        )

    @property
    def order(self) -> tuple[str, ...]:
        """The stages without their resources."""
        return tuple(place.stage for place in self.placements)

    @property
    def ahead(self) -> tuple[str, ...]:
        """The stages that run ahead of time."""
        return tuple(stage for stage in AHEAD if stage in self.order)

    @property
    def beside(self) -> tuple[str, ...]:
        """The stages on "side", in order."""
        return tuple(place.stage for place in self.placements if place.resource == "side")

    def helps(self, temperature: float) -> bool:
        """Whether anything runs ahead of time at this temperature: at 0 there is no noise to draw."""
        return any(stage != "noise" or temperature > 0 for stage in self.ahead)

    def form(self, stage: str) -> str:
        """Under which name the stage's milliseconds are measured: where it runs, and what ran ahead of
        time, change its work.
        """
        if stage in AHEAD:
            return f"{stage} on {'side' if stage in self.beside else 'main'}"
        eased = next((earlier for earlier in _EASED.get(stage, ()) if earlier in self.ahead), None)
        return stage if eased is None else f"{stage} after {eased}"

    @classmethod
    def from_json(cls, payload: Mapping[str, Any]) -> Plan:
        """Of `asdict`. Raises ConfigError, KeyError or TypeError on what is not a valid plan."""
        return cls(payload["name"], tuple(Placement(**placement) for placement in payload["placements"]))


SEQUENTIAL = Plan.of("sequential", MAIN)
"""The order of `Engine.step`, nothing ahead of time."""
