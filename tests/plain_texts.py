"""Whether speculation of a pair writes plain decoding's texts."""

from __future__ import annotations

from dataclasses import replace

from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.pair import LoadedPair
from yggdrasil.report.run import Run
from yggdrasil.state import Shape

PROMPTS = ("Once upon a time", "One day Lily saw a", "The owl")
SAMPLED = SamplingConfig(temperature=0.8, seed=11)


def assert_equal_to_plain(pair: LoadedPair, sampling: SamplingConfig) -> None:
    """Pruned trees, chains and the default policy write plain decoding's texts, and accept some drafts."""
    accepted = 0
    for text in PROMPTS:
        prompt = pair.tokenizer.encode(text)
        config = GenerateConfig(max_new_tokens=60, ignore_eos=True, sampling=sampling)
        plain = Run(pair, prompt, replace(config, plain=True)).complete()
        for shape in (Shape(2, 3, 4), Shape(1, 2), None):
            policy = pair.policy(temperature=sampling.temperature, shape=shape)
            run = Run(pair, prompt, config, policy=policy).complete()
            assert run.tokens == plain.tokens, f"{text}, {shape}"
            accepted += sum(result.accepted for result in run.results)
    assert accepted > 0
