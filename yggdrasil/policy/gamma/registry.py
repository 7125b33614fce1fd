"""Every policy of speculative lengths by the name that the command line and the benchmarks use."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from yggdrasil.config import from_dict
from yggdrasil.errors import ConfigError
from yggdrasil.policy.gamma.adabingreedy import AdaBinGreedy
from yggdrasil.policy.gamma.banditspec import BanditSpec
from yggdrasil.policy.gamma.dsd import DSD
from yggdrasil.policy.gamma.fixed import FixedGamma
from yggdrasil.policy.gamma.linear import LinThompson, LinUCB
from yggdrasil.policy.gamma.nightjar import Nightjar, PrintedNightjar
from yggdrasil.policy.gamma.prior import GoodputPrior, SwitchingCost, predicted_goodput
from yggdrasil.policy.gamma.protocol import GammaPolicy
from yggdrasil.policy.gamma.tetris import Tetris
from yggdrasil.policy.gamma.tiers import AdaptiveTiers, TierConfig

__all__ = ["POLICIES", "PolicyParts", "gamma_policy", "policy_builder", "predicted_goodput"]

# drafts 5 a row and verifies as many tokens as a fixed 3 would
TETRIS_GAMMA = 5
TETRIS_SHARE = 0.6


@dataclass(frozen=True)
class PolicyParts:
    """What policies are made of.

    Args:
        gamma_max: Greatest speculative length at any batch size, at least 1.
        seed: Of the policies that draw random numbers.
    """

    gamma_max: int
    max_batch: int
    prior: GoodputPrior
    switching_cost: SwitchingCost
    seed: int = 0

    @property
    def random(self) -> np.random.Generator:
        """A new generator."""
        return np.random.default_rng(self.seed)


def _dsd(parts: PolicyParts) -> DSD:
    """Its offline measurements are the profile's, at geometric batch sizes as far as one graph holds them;
    its first rate is the calibrated acceptance of a first draft token."""
    sizes = [2**power for power in range(parts.max_batch.bit_length())]
    widest = max(parts.prior.widths, default=math.inf)
    arms = [
        (size, gamma)
        for size in sizes
        for gamma in range(parts.gamma_max + 1)
        if size * (gamma + 1) <= widest
    ]
    points = [(size, gamma, parts.prior.seconds(size, gamma)) for size, gamma in arms]
    return DSD(points, rate=parts.prior.emitted(1) - 1)


POLICIES: Mapping[str, Callable[[PolicyParts], GammaPolicy]] = {
    "nightjar": lambda parts: Nightjar(
        parts.prior, parts.switching_cost, gamma_max=parts.gamma_max, max_batch=parts.max_batch
    ),
    "nightjar-printed": lambda parts: PrintedNightjar(parts.switching_cost, parts.random),
    "off": lambda parts: FixedGamma(0),
    "dsd": _dsd,
    "banditspec": lambda parts: BanditSpec(),
    "tetris": lambda parts: Tetris(min(TETRIS_GAMMA, parts.gamma_max), share=TETRIS_SHARE),
    "linucb": lambda parts: LinUCB(parts.gamma_max, parts.max_batch),
    "lints": lambda parts: LinThompson(parts.gamma_max, parts.max_batch, parts.random),
    "ada-bingreedy": lambda parts: AdaBinGreedy(parts.random),
    "tiers": lambda parts: AdaptiveTiers(TierConfig()),
}
"""Builders of the policies without an argument; `policy_builder` also knows `fixed-N` and `tiers:PATH`."""


def gamma_policy(name: str, parts: PolicyParts) -> GammaPolicy:
    """The policy of this name; raises as `policy_builder` does."""
    return policy_builder(name, parts.gamma_max)(parts)


def policy_builder(name: str, gamma_max: int) -> Callable[[PolicyParts], GammaPolicy]:
    """What makes the policy of this name, before there is a profile to make it of.

    Args:
        name: One of POLICIES, "fixed-N" with N from 1 to `gamma_max`, or "tiers:PATH" with a JSON file of
            `TierConfig`.

    Raises:
        ConfigError: No such policy, or its file cannot be used.
    """
    if name in POLICIES:
        return POLICIES[name]
    kind, _, argument = name.partition("-")
    if kind == "fixed" and argument.isdecimal() and 1 <= int(argument) <= gamma_max:
        return lambda parts: FixedGamma(int(argument))
    kind, _, path = name.partition(":")
    if kind == "tiers" and path:
        tiers = _tier_config(Path(path))
        return lambda parts: AdaptiveTiers(tiers)
    raise ConfigError(
        "policy", name, f"one of {', '.join(POLICIES)}, fixed-1 to fixed-{gamma_max}, tiers:PATH"
    )


def _tier_config(path: Path) -> TierConfig:
    try:
        payload = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("policy", f"tiers:{path}", f"tiers:PATH with a JSON file ({error})") from None
    if not isinstance(payload, dict):
        raise ConfigError("policy", f"tiers:{path}", "tiers:PATH with a JSON object")
    return from_dict(TierConfig, payload)
