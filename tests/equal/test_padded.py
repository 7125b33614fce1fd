"""Models whose vocabularies differ by padding: padded ids are never drafted nor emitted, at any logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_pair
import torch
from conftest import SMALLEST, compiled

from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.models.packing import pack_chain_
from yggdrasil.pair import LoadedPair, load_pair
from yggdrasil.state import PLAIN, Shape

PADDED_VOCAB = 400
PROMPT = "Once upon a time"
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def folders(ygg_home: Path, llama_folders: tuple[str, str]) -> dict[str, tuple[str, str]]:
    """The Llama pair with a padded target, and with a padded draft."""
    target, draft = llama_folders
    padded = [
        tiny_pair.save_padded(model, ygg_home / "models" / f"padded-{Path(model).name}", PADDED_VOCAB)
        for model in llama_folders
    ]
    return {"target": (padded[0], draft), "draft": (target, padded[1])}


def load(ygg_home: Path, folders: dict[str, tuple[str, str]], which: str) -> LoadedPair:
    return load_pair(
        compiled(ygg_home, f"padded-{which}", folders[which], replace(SMALLEST, dtype="float32")).name
    )


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """The greedy text of transformers."""
    written: torch.Tensor = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return written[0, len(prompt) :].tolist()


def decode(pair: LoadedPair, shape: Shape, sampling: SamplingConfig) -> list[int]:
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, ignore_eos=True, sampling=sampling)
    policy = pair.policy(shape=shape, temperature=sampling.temperature)
    return [
        token
        for result in pair.engine.generate(pair.tokenizer.encode(PROMPT), policy, config)
        for token in result.tokens
    ]


def test_a_padded_target_writes_the_text_without_padding(
    ygg_home: Path, folders: dict[str, tuple[str, str]], llama_folders: tuple[str, str], kernels: None
) -> None:
    from transformers import AutoModelForCausalLM

    pair = load(ygg_home, folders, "target")
    prompt = pair.tokenizer.encode(PROMPT)
    padded, bare = (
        AutoModelForCausalLM.from_pretrained(name) for name in (folders["target"][0], llama_folders[0])
    )
    assert max(greedy(padded, prompt)) >= tiny_pair.VOCAB  # padded ids have the largest logits
    for shape in (PLAIN, Shape(2, 3, 4)):
        assert decode(pair, shape, SamplingConfig()) == greedy(bare, prompt)
    sampled = SamplingConfig(temperature=1.0, seed=7)
    assert decode(pair, Shape(2, 3, 4), sampled) == decode(pair, PLAIN, sampled)


def test_a_padded_draft_proposes_only_tokens_of_the_target(
    ygg_home: Path, folders: dict[str, tuple[str, str]], kernels: None
) -> None:
    from transformers import AutoModelForCausalLM

    pair = load(ygg_home, folders, "draft")
    draft = pair.engine.draft
    prompt = pair.tokenizer.encode(PROMPT + " there was")
    padded = AutoModelForCausalLM.from_pretrained(folders["draft"][1])
    with torch.no_grad():
        logits_NV = padded(input_ids=torch.tensor([prompt])).logits[0]
    assert logits_NV.argmax(-1).max() >= tiny_pair.VOCAB
    draft.cache.rollback_(0)
    draft.cache.reserve(len(prompt))
    meta_NM = draft.meta(len(prompt))
    pack_chain_(meta_NM, prompt, 0)
    tokens_NC, log_probs_NC = draft.forward(meta_NM)
    kept_NV = logits_NV[:, : tiny_pair.VOCAB].log_softmax(-1)
    assert torch.equal(tokens_NC[: len(prompt), 0], kept_NV.argmax(-1))
    torch.testing.assert_close(log_probs_NC[: len(prompt), 0], kept_NV.amax(-1), rtol=1e-4, atol=1e-4)
    assert decode(pair, Shape(2, 3, 4), SamplingConfig()) == decode(pair, PLAIN, SamplingConfig())
