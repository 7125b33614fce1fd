"""Adaptive tiers: a few fixed speculative lengths, chosen by a moving average of accepted tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from yggdrasil.errors import ConfigError
from yggdrasil.policy.gamma.protocol import ChainPolicy, Load, Outcome

__all__ = ["AdaptiveTiers", "TierConfig"]


@dataclass(frozen=True, kw_only=True)
class TierConfig:
    """The keys of SGLang's `--speculative-adaptive-config`.

    Args:
        candidate_steps: Tiers, ascending.
        ema_alpha: Weight of the last batch in the average.
        warmup_batches: Batches before the first interval.
        down_hysteresis: Added to the bound for moving down a tier.
        up_hysteresis: Added to the bound for moving up a tier.
    """

    candidate_steps: tuple[int, ...] = (1, 3, 7)
    ema_alpha: float = 0.2
    update_interval: int = 5
    warmup_batches: int = 10
    down_hysteresis: float = -0.25
    up_hysteresis: float = 0.0

    def __post_init__(self) -> None:
        steps = self.candidate_steps
        if not steps or list(steps) != sorted(set(steps)) or steps[0] < 1:
            raise ConfigError("candidate_steps", steps, "ascending numbers, each at least 1")
        if not 0 < self.ema_alpha <= 1:
            raise ConfigError("ema_alpha", self.ema_alpha, "above 0 and at most 1")
        if self.update_interval < 1:
            raise ConfigError("update_interval", self.update_interval, "at least 1")
        if self.warmup_batches < 0:
            raise ConfigError("warmup_batches", self.warmup_batches, "0 or above")


class AdaptiveTiers(ChainPolicy):
    """The tier one step beyond the average accepted length, with hysteresis both ways.

    Args:
        initial_steps: The first tier is the one nearest to this length.

    Source: SGLang, "Adaptive Speculative Decoding". Departures: the average starts at the first batch's
    mean; a tier beyond `gamma_max` runs at `gamma_max`; steps without drafts are ignored.

    >>> AdaptiveTiers(TierConfig(), initial_steps=4).select(Load(batch_size=2, deepest=7))
    3
    """

    def __init__(self, config: TierConfig, *, initial_steps: int = 3) -> None:
        self.config = config
        self.tier = min(
            range(len(config.candidate_steps)),
            key=lambda tier: abs(config.candidate_steps[tier] - initial_steps),
        )
        self.accepted: float | None = None
        self.batches = 0

    @property
    def num_steps(self) -> int:
        """Speculative length of the current tier."""
        return self.config.candidate_steps[self.tier]

    def select(self, load: Load) -> int:
        return min(self.num_steps, load.gamma_max)

    def observe(self, outcome: Outcome) -> None:
        if outcome.gamma == 0:
            return
        accepted = sum(outcome.emitted) / len(outcome.emitted) - 1
        if self.accepted is None:
            self.accepted = accepted
        else:
            self.accepted += self.config.ema_alpha * (accepted - self.accepted)
        self.batches += 1
        since_warmup = self.batches - self.config.warmup_batches
        if since_warmup > 0 and since_warmup % self.config.update_interval == 0:
            self._move_tier_(self.accepted)

    def _move_tier_(self, accepted: float) -> None:
        """Move until round(accepted) + 1 is the tier's length, or lies between it and its neighbour's."""
        steps = self.config.candidate_steps
        config = self.config
        while self.tier > 0 and accepted <= steps[self.tier - 1] - 0.5 + config.down_hysteresis:
            self.tier -= 1
        while self.tier < len(steps) - 1 and accepted > steps[self.tier] - 0.5 + config.up_hysteresis:
            self.tier += 1

    @property
    def state(self) -> dict[str, Any]:
        return {
            "speculative_num_steps": self.num_steps,
            "avg_spec_accept_length": round(self.accepted or 0.0, 4),
        }
