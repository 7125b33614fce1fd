"""Whether a pair writes plain decoding's texts with speculation, and equal bits from streamed weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.loading import load_models
from yggdrasil.models.packing import pack_chain_
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


def assert_streamed_equal(pair: LoadedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """All graphs write the same bits if they take their weights for larger than the caches."""
    monkeypatch.setattr("yggdrasil.compiler.model.MOST_CACHED", 0)
    streamed = load_models(pair.bundle)
    for model, other in zip((pair.engine.target, pair.engine.draft), streamed, strict=True):
        model.cache.rollback_(0)
        for size in model.menu.sizes:
            tokens = list(range(60, 60 + size))
            outputs = []
            for each in (model, other):
                meta_NM = each.meta(size)
                pack_chain_(meta_NM, tokens, 0)
                outputs.append(each.forward(meta_NM))
            for one, same in zip(*outputs, strict=True):
                assert torch.equal(one, same), f"{size} tokens"
