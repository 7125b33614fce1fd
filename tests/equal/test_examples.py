"""The examples run, and their texts are the target's own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from yggdrasil.config import GenerateConfig
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.uncalibrated import plain_policy

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_policy_of_ones_own_changes_no_text(tiny: LoadedPair) -> None:
    spec = importlib.util.spec_from_file_location("example_policy", EXAMPLES / "policy.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    policy = example.Doubting(tiny.acceptance.nearest(0.0).calibration)
    prompt = tiny.tokenizer.encode("Once upon a time")
    config = GenerateConfig(max_new_tokens=40, ignore_eos=True)
    results = list(tiny.engine.generate(prompt, policy, config))
    plain = list(tiny.engine.generate(prompt, plain_policy(), config))
    texts = [[token for result in each for token in result.tokens] for each in (results, plain)]
    assert texts[0] == texts[1]
    assert {result.shape.width for result in results} == {1, 4}
