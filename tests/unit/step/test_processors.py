"""Logits processors against transformers' own and OpenAI's formula, over random texts and trees."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process

from yggdrasil.config import ProcessorConfig, SamplingConfig
from yggdrasil.errors import ConfigError
from yggdrasil.state import DecodeState
from yggdrasil.step.coupling import FORBIDDEN
from yggdrasil.step.processors import prefixes_of, process, process_candidates
from yggdrasil.tree import TokenTree

VOCAB = 12
TOKENS = st.integers(0, VOCAB - 1)
CONFIGS = st.builds(
    ProcessorConfig,
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([-3.0, 0.5, float("-inf")]), max_size=3).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.2]),
    no_repeat_ngram_size=st.integers(0, 4),
    banned=st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=2, unique=True).map(
        tuple
    ),
    min_tokens=st.integers(0, 5),
    ends=st.lists(TOKENS, max_size=2).map(tuple),
)


def transformed(
    text: list[int], prompt_len: int, logits_V: torch.Tensor, config: ProcessorConfig
) -> torch.Tensor:
    """The logits after a text by transformers' processors, and by OpenAI's formula for the penalties that
    transformers does not have."""
    ids = torch.tensor([text])
    scores = logits_V[None].clone()
    for token, value in config.logit_bias:
        scores[0, token] += value
    if config.repetition_penalty != 1:
        penalty = logits_process.RepetitionPenaltyLogitsProcessor(config.repetition_penalty)
        scores = penalty(ids, scores)
    for token, count in Counter(text[prompt_len:]).items():
        scores[0, token] -= config.frequency_penalty * count + config.presence_penalty
    if config.no_repeat_ngram_size:
        scores = logits_process.NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size)(ids, scores)
    if config.banned:
        words = [list(sequence) for sequence in config.banned]
        scores = logits_process.NoBadWordsLogitsProcessor(words)(ids, scores)
    if config.min_tokens and config.ends:
        shortest = logits_process.MinNewTokensLengthLogitsProcessor(
            prompt_len, config.min_tokens, list(config.ends)
        )
        scores = shortest(ids, scores)
    return scores[0]


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.lists(TOKENS, min_size=1, max_size=6),
    output=st.lists(TOKENS, max_size=8),
    parents=st.lists(st.integers(0, 6), max_size=7),
    config=CONFIGS,
    seed=st.integers(0, 9),
)
def test_every_node_is_processed_as_transformers_processes_its_path(
    prompt: list[int], output: list[int], parents: list[int], config: ProcessorConfig, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    state = DecodeState([*prompt, *output], prompt_len=len(prompt))
    tree = TokenTree.root(state.tokens[-1], 8)
    for node, parent in enumerate(parents):
        token = torch.randint(VOCAB, (1,), generator=generator)
        tree.grow(torch.tensor([min(parent, node)]), token, torch.zeros(1))
    logits_KV = 4 * torch.randn(len(tree), VOCAB, generator=generator)
    processed_KV = process(logits_KV, prefixes_of(tree, slice(len(tree)), state), config)
    for node, logits_V in enumerate(logits_KV):
        path = [int(tree.token_N[each]) for each in tree.path_NA[node] if each >= 0]
        expected_V = transformed(state.tokens[:-1] + path, len(prompt), logits_V, config)
        torch.testing.assert_close(processed_KV[node], expected_V, atol=1e-6, rtol=1e-6)


def test_a_banned_candidate_comes_last_and_is_marked() -> None:
    state = DecodeState([3, 4, 5])
    tree = TokenTree.root(5, 1)
    tokens_1M = torch.tensor([[7, 8, 9]])
    log_probs_1M = torch.tensor([[-0.1, -2.0, -3.0]])
    tokens, scores = process_candidates(
        tokens_1M,
        log_probs_1M,
        prefixes_of(tree, slice(1), state),
        ProcessorConfig(banned=((7,),)),
        top_logit=10.0,
        vocab=VOCAB,
    )
    assert tokens.tolist() == [[8, 9, 7]]
    assert scores.tolist() == [[8.0, 7.0, pytest.approx(FORBIDDEN)]]


def test_options_without_effect_make_no_processors() -> None:
    assert SamplingConfig.of(
        {"temperature": 0.5, "repetition_penalty": 1.0, "banned": []}
    ) == SamplingConfig(temperature=0.5)
    assert SamplingConfig.of({"logit_bias": {3: -1.0, 1: 2.0}}).processors == ProcessorConfig(
        logit_bias=((1, 2.0), (3, -1.0))
    )


def test_the_shortest_text_knows_what_ends_it() -> None:
    sampling = SamplingConfig.of({"min_tokens": 4})
    assert sampling.ending_with({9, 2, 10}, 10).processors == ProcessorConfig(min_tokens=4, ends=(2, 9))
    assert replace(sampling, processors=None).ending_with({9}, 10).processors is None


@pytest.mark.parametrize(
    ("field", "value"),
    (
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", 1e-40),
        ("presence_penalty", -1e39),
        ("frequency_penalty", 1e39),
        ("logit_bias", ((1, 1e39),)),
        ("logit_bias", ((1, -1e39),)),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", float("inf")),
        ("no_repeat_ngram_size", -1),
        ("min_tokens", -1),
        ("logit_bias", ((1, float("nan")),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", ((-1, 1.0),)),
        ("banned", ((),)),
    ),
)
def test_a_value_that_is_not_allowed_is_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError):
        ProcessorConfig(**{field: value})
