"""Which policy a loaded pair takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from yggdrasil.pair import LoadedPair
from yggdrasil.policy.shape import BestShape, ContextShape, DepthRule, StoppingShape


@pytest.mark.parametrize(
    ("rule", "policy"), (("fixed", BestShape), ("predicted", ContextShape), ("stopping", StoppingShape))
)
def test_a_pair_takes_the_rule_that_was_best_on_held_out_text(
    tiny: LoadedPair, rule: DepthRule, policy: type
) -> None:
    """The rule of the nearest temperature, unless the caller names another."""
    other: DepthRule = "stopping" if rule == "fixed" else "fixed"
    pair = replace(tiny, depth=replace(tiny.depth, rules={0.0: rule, 1.0: other}))
    assert type(pair.policy(temperature=0.3, guard=False)) is policy
    assert type(pair.policy(temperature=0.7, guard=False)) is not policy
    assert type(pair.policy(temperature=0.7, depth=rule, guard=False)) is policy
