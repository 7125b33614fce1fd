"""The latency-aware objective: how many times faster than plain decoding a shape is."""

from __future__ import annotations

from yggdrasil.policy.latency import LatencyModel

__all__ = ["speedup"]


def speedup(
    aal: float, *, width: int, depth: int, verify: int, context_len: int, latency: LatencyModel
) -> float:
    """Eq. 3: AAL(W, D, K) * T_verify(1) / (sum over D of T_draft(W) + T_verify(K)).

    Measured host time is added to the numerator's and the denominator's times.

    Args:
        aal: Emitted tokens per target forward, the bonus included.
        depth: D; 0 gives 1.
        context_len: Committed tokens.

    Source: Yggdrasil Eq. (3). Departure: host time, which the paper's schedule hides, is a term here.
    """
    return aal * latency.plain_ms(context_len) / latency.step_ms(width, depth, verify, context_len)
