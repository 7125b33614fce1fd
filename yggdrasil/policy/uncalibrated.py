"""Policies that need no measurements: plain decoding, and the shapes that calibration itself uses."""

from __future__ import annotations

import math

from yggdrasil.policy.acceptance import Acceptance
from yggdrasil.policy.latency import Curve, LatencyModel
from yggdrasil.policy.shape import FixedShape
from yggdrasil.state import PLAIN, Shape

__all__ = ["UNCALIBRATED", "plain_policy", "uncalibrated_policy"]

NO_LATENCY = LatencyModel(Curve((0,), (1,), ((1.0,),)), Curve((0,), (1,), ((1.0,),)), 0.0, 0.0, 0.0)
KNOTS = tuple(-0.25 * step for step in range(32, -1, -1))
# acceptance equals the draft's probability
UNCALIBRATED = Acceptance(KNOTS, tuple(math.exp(knot) for knot in KNOTS), {})


def plain_policy() -> FixedShape:
    """Plain decoding; it needs no measurements."""
    return uncalibrated_policy(PLAIN)


def uncalibrated_policy(shape: Shape) -> FixedShape:
    """A shape with a fixed K, for a pair without measurements."""
    assert shape.verify is not None
    return FixedShape(shape, UNCALIBRATED, NO_LATENCY, (shape.verify,))
