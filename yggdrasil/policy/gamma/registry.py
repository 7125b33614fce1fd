"""All policies of speculative lengths by name, as the command line and the benchmarks use them."""

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
from yggdrasil.policy.gamma.protocol import BatchPolicy, ChainPolicy
from yggdrasil.policy.gamma.tetris import Tetris
from yggdrasil.policy.gamma.tiers import AdaptiveTiers, TierConfig
from yggdrasil.policy.trees import TreeParts, Trees

__all__ = [
    "POLICIES",
    "TREES",
    "PolicyParts",
    "batch_policy",
    "check_policy",
    "gamma_policy",
    "policy_builder",
    "predicted_goodput",
]

# TETRIS drafts 5 tokens per row and verifies as many tokens as a fixed length of 3.
TETRIS_GAMMA = 5
TETRIS_SHARE = 0.6


@dataclass(frozen=True)
class PolicyParts:
    """What policies are built from.

    Args:
        gamma_max: Largest speculative length at any batch size, at least 1.
        trees: What the policy of trees knows of the pair; None builds no such policy.
        seed: Seed of the policies that draw random numbers.
    """

    gamma_max: int
    max_batch: int
    prior: GoodputPrior
    switching_cost: SwitchingCost
    trees: TreeParts | None = None
    seed: int = 0

    @property
    def random(self) -> np.random.Generator:
        """A new generator of random numbers."""
        return np.random.default_rng(self.seed)


def _dsd(parts: PolicyParts) -> DSD:
    """DSD with offline measurements from the profile, at batch sizes of powers of 2 that fit in one graph.

    Its first rate is the calibrated acceptance of a first draft token."""
    sizes = [2**power for power in range(parts.max_batch.bit_length())]
    gammas = range(parts.gamma_max + 1)
    widest = max(parts.prior.widths, default=math.inf)
    arms = [(size, gamma) for size in sizes for gamma in gammas if size * (gamma + 1) <= widest]
    points = [(size, gamma, parts.prior.seconds(size, gamma)) for size, gamma in arms]
    return DSD(points, rate=parts.prior.emitted(1) - 1)


TREES = "trees"
POLICIES: Mapping[str, Callable[[PolicyParts], ChainPolicy]] = {
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
"""Builders of policies without an argument; `policy_builder` also accepts `fixed-N` and `tiers:PATH`."""


def batch_policy(name: str, parts: PolicyParts) -> BatchPolicy:
    """Build the policy of this name, one of trees or of chains; raises the errors of `check_policy`."""
    if name == TREES and parts.trees is not None:
        return Trees(parts.trees, parts.switching_cost)
    return gamma_policy(name, parts)


def gamma_policy(name: str, parts: PolicyParts) -> ChainPolicy:
    """Build the policy of chains of this name; raises the errors of `check_policy`."""
    return policy_builder(name, parts.gamma_max)(parts)


def check_policy(name: str, gamma_max: int) -> None:
    """Raise the errors of `policy_builder`."""
    if name != TREES:
        policy_builder(name, gamma_max)


def policy_builder(name: str, gamma_max: int) -> Callable[[PolicyParts], ChainPolicy]:
    """Look up the builder of a policy; this needs no profile yet.

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
        "policy", name, f"one of {TREES}, {', '.join(POLICIES)}, fixed-1 to fixed-{gamma_max}, tiers:PATH"
    )


def _tier_config(path: Path) -> TierConfig:
    try:
        payload = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("policy", f"tiers:{path}", f"tiers:PATH with a JSON file ({error})") from None
    if not isinstance(payload, dict):
        raise ConfigError("policy", f"tiers:{path}", "tiers:PATH with a JSON object")
    return from_dict(TierConfig, payload)
