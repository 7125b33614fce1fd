"""What a step is predicted to do before anything has been observed: from measured latencies and calibrated acceptance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from yggdrasil.errors import ConfigError
from yggdrasil.policy.acceptance import Acceptance
from yggdrasil.policy.latency import Curve, LatencyModel

__all__ = ["GoodputPrior", "SwitchingCost", "predicted_goodput"]

SwitchingCost = Callable[[int, int], float]
"""c_prefill: seconds until the draft's KV is there again, by lag in tokens and batch size. Source: Nightjar section 4.2, Table 3."""


@dataclass(frozen=True)
class GoodputPrior:
    """The predicted step of B rows at a speculative length; calling it gives tokens per second.

    Args:
        seconds: Of a step, by batch size and gamma.
        emitted: Tokens of a row in a step, by gamma; 1 at gamma 0.

    >>> GoodputPrior(seconds=lambda batch_size, gamma: 0.01 + 0.002 * gamma, emitted=lambda gamma: 1 + 0.5 * gamma)(8, 2)
    1142.857142857143
    """

    seconds: Callable[[int, int], float]
    emitted: Callable[[int], float]

    def __call__(self, batch_size: int, gamma: int) -> float:
        return batch_size * self.emitted(gamma) / self.seconds(batch_size, gamma)


def predicted_goodput(latency: LatencyModel, acceptance: Acceptance, context_len: int, draft_widest: int) -> GoodputPrior:
    """The prior of a compiled pair.

    A step is gamma draft forwards of B tokens, one verification of B * (gamma + 1) tokens, and the host's share. Beyond the calibrated depth a
    longer chain is taken to emit no more.

    Args:
        latency: Profile of this machine.
        acceptance: Calibration of this pair; width 1 must be in it.
        context_len: Tokens of context of a typical row.
        draft_widest: Tokens of the draft's greatest graph; more rows take several.

    Raises:
        ConfigError: The pair was calibrated without chains.
    """
    if 1 not in acceptance.aal:
        raise ConfigError("widths", sorted(acceptance.aal), "a menu with width 1, for batches draft chains", "compile the pair again")

    def seconds(batch_size: int, gamma: int) -> float:
        verify_ms = _graphs_ms(latency.verify, batch_size * (gamma + 1), latency.verify.sizes[-1], context_len)
        if gamma == 0:
            return (verify_ms + latency.plain_host_ms) / 1e3
        draft_ms = _graphs_ms(latency.draft, batch_size, draft_widest, context_len) + latency.growth_host_ms
        return (gamma * draft_ms + verify_ms + latency.step_host_ms) / 1e3

    def emitted(gamma: int) -> float:
        depth = min(gamma, acceptance.max_depth)
        return acceptance.expected_emitted(1, depth, depth + 1) if depth else 1.0

    return GoodputPrior(seconds, emitted)


def _graphs_ms(curve: Curve, num_tokens: int, widest: int, context_len: int) -> float:
    """Full graphs one after the other and one for the rest."""
    full, rest = divmod(num_tokens, widest)
    return full * curve.at(widest, context_len) + (curve.at(rest, context_len) if rest else 0.0)
