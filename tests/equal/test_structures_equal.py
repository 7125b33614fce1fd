"""With every tree structure the text is that of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest

from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.baselines import (
    dynamic_sequence,
    equal_growth,
    k_ary,
    opt_tree,
    sequence,
    sequoia,
    sequoia_latency,
)
from yggdrasil.policy.latency import Curve, LatencyModel
from yggdrasil.policy.shape import BestShape, DepthRule, FixedShape
from yggdrasil.policy.uncalibrated import plain_policy
from yggdrasil.state import Shape, StepResult

PROMPTS = ("Once upon a time", "One day Lily saw a red fox near the café.", "xyz 123")
FREE = LatencyModel(
    Curve((0,), (2, 4, 8, 64), ((0.1,) * 4,)), Curve((0,), (2, 4, 8, 16, 64), ((10.0,) * 5,)), 0.0, 0.0, 0.0
)
BY_RANK = (0.5, 0.2, 0.1, 0.05)
STRUCTURES = {
    "sequence": sequence(4),
    "dynamic sequence": dynamic_sequence(4, 0.5),
    "binary": k_ary(2, 3),
    "ternary, cut": k_ary(3, 3, num_nodes=16),
    "sequoia": sequoia(BY_RANK, 16, 4),
    "sequoia, a level wider than any draft graph": sequoia(BY_RANK, 16, 2),
    "opt-tree": opt_tree(16, 4, 4, 0.6),
    "equal growth": equal_growth(4, 3, 8),
}


def steps(
    pair: LoadedPair, prompt: str, policy: FixedShape, sampling: SamplingConfig
) -> Sequence[StepResult]:
    config = GenerateConfig(max_new_tokens=48, ignore_eos=True, sampling=sampling)
    return list(pair.engine.generate(pair.tokenizer.encode(prompt), policy, config))


def fixed(pair: LoadedPair, shape: Shape) -> FixedShape:
    return FixedShape(shape, pair.acceptance.nearest(0.0), pair.latency, pair.bundle.config.verify_widths)


def text(results: Sequence[StepResult]) -> list[int]:
    return [token for result in results for token in result.tokens]


@pytest.mark.parametrize("temperature", (0.0, 0.8))
@pytest.mark.parametrize("name", STRUCTURES)
def test_every_structure_writes_the_plain_text(tiny: LoadedPair, name: str, temperature: float) -> None:
    for seed, prompt in enumerate(PROMPTS):
        sampling = SamplingConfig(temperature=temperature, seed=seed)
        assert text(steps(tiny, prompt, fixed(tiny, STRUCTURES[name]), sampling)) == text(
            steps(tiny, prompt, plain_policy(), sampling)
        )


def test_sequoia_latency_with_a_real_profile_writes_the_plain_text(tiny: LoadedPair) -> None:
    shape = sequoia_latency(BY_RANK, 4, tiny.latency, tiny.bundle.config.verify_widths, 64)
    assert text(steps(tiny, PROMPTS[0], fixed(tiny, shape), SamplingConfig())) == text(
        steps(tiny, PROMPTS[0], plain_policy(), SamplingConfig())
    )


@pytest.mark.parametrize("name", ("dynamic sequence", "opt-tree"))
def test_stop_rules_stop_at_different_depths(tiny: LoadedPair, name: str) -> None:
    """Without this, the equalities above would prove little about stop rules."""
    results = [
        result
        for prompt in PROMPTS
        for result in steps(tiny, prompt, fixed(tiny, STRUCTURES[name]), SamplingConfig())
    ]
    assert len({result.drafted for result in results}) > 1
    assert all(result.drafted == result.shape.num_nodes and result.shape.stop is None for result in results)


@pytest.mark.parametrize("depth", get_args(DepthRule))
def test_every_depth_rule_writes_the_plain_text(tiny: LoadedPair, depth: DepthRule) -> None:
    chosen = tiny.policy(depth=depth, guard=False)
    assert isinstance(chosen, BestShape)
    # if only verification takes time, speculation is best for any pair
    eager = replace(chosen, latency=FREE)
    written = steps(tiny, PROMPTS[0], eager, SamplingConfig())
    assert text(written) == text(steps(tiny, PROMPTS[0], plain_policy(), SamplingConfig()))
    assert max(result.shape.depth for result in written) > 1


def test_static_trees_are_drafted_and_verified_whole(tiny: LoadedPair) -> None:
    results = steps(tiny, PROMPTS[0], fixed(tiny, STRUCTURES["binary"]), SamplingConfig())
    assert {(result.drafted, result.verified) for result in results} == {(15, 15)}
    assert max(result.accepted for result in results) == 3
