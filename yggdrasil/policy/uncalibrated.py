"""Shapes for which nothing has to be measured: plain decoding, and those that calibration itself decodes
with.
"""

from __future__ import annotations

import math

from yggdrasil.policy.acceptance import Acceptance
from yggdrasil.policy.latency import Curve, LatencyModel
from yggdrasil.policy.shape import FixedShape
from yggdrasil.state import PLAIN, Shape

__all__ = ["UNCALIBRATED", "plain_policy", "uncalibrated_policy"]

NO_LATENCY = LatencyModel(Curve((0,), (1,), ((1.0,),)), Curve((0,), (1,), ((1.0,),)), 0.0, 0.0, 0.0)
KNOTS = tuple(-0.25 * step for step in range(32, -1, -1))
UNCALIBRATED = Acceptance(KNOTS, tuple(math.exp(knot) for knot in KNOTS), {})  # takes the draft at its word


def plain_policy() -> FixedShape:
    """Plain decoding, for which nothing has to be known yet."""
    return uncalibrated_policy(PLAIN)


def uncalibrated_policy(shape: Shape) -> FixedShape:
    """A shape with a set K, before anything is known about the pair."""
    assert shape.verify is not None
    return FixedShape(shape, UNCALIBRATED, NO_LATENCY, (shape.verify,))
