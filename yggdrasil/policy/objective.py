"""The latency-aware objective: how many times faster than plain decoding a shape is."""

from __future__ import annotations

from yggdrasil.policy.latency import LatencyModel

__all__ = ["speedup"]


def speedup(
    aal: float, *, width: int, depth: int, verify: int, context_len: int, latency: LatencyModel
) -> float:
    """Eq. 3: AAL(W, D, K) * T_verify(1) / (sum over D of T_draft(W) + T_verify(K)), with the host's
    measured share on both sides.

    Args:
        aal: Emitted tokens per target forward, the bonus included.
        width: W.
        depth: D; 0 gives 1.
        verify: K.
        context_len: Committed tokens.
        latency: The profile.

    Source: Yggdrasil Eq. (3). Departure: the overhead of the host, which the paper's schedule hides, is a
    term here."""
    return aal * latency.plain_ms(context_len) / latency.step_ms(width, depth, verify, context_len)
