"""The acceptance law with coupled drafts: trees that depend on the noise do not change the text.

Target and draft are functions from a text to logits over a small vocabulary. A tree's children are the best
of the draft's coupled candidates; the tokens come from `accept`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
import torch
from scipy import stats
from torch import Tensor

from yggdrasil.config import SamplingConfig
from yggdrasil.step.accept import accept
from yggdrasil.step.coupling import coupled, noise_of
from yggdrasil.step.sampling import process_logits
from yggdrasil.tree import TokenTree

pytestmark = pytest.mark.usefixtures("kernels")

VOCAB = 5
NUM_TOKENS = 6
NUM_SEEDS = 3000
Text = tuple[int, ...]
PROMPT: Text = (0, 1)
SAMPLINGS = (
    SamplingConfig(temperature=1.0),
    SamplingConfig(temperature=0.6, top_k=3),
    SamplingConfig(temperature=1.3, top_p=0.8),
)


@cache
def target(text: Text) -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash(text) % 2**31)) * 1.5


def draft(text: Text) -> Tensor:
    """The target with errors."""
    error = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1 + hash(text) % 2**31))
    return target(text) + 0.7 * error


def children(text: Text, sampling: SamplingConfig, count: int) -> list[int]:
    """The draft's best coupled candidates after a text."""
    best = draft(text).log_softmax(-1)[None].sort(dim=-1, descending=True, stable=True)
    noise_1V = noise_of(sampling, [len(text)], VOCAB, "cpu").gather(1, best.indices)
    return coupled(best.indices, best.values, noise_1V, sampling, count)[0][0].tolist()


def tree_after(text: Text, sampling: SamplingConfig, width: int) -> tuple[TokenTree, list[Text]]:
    """Two levels, each node with `width` children; and the text of every node."""
    if width == 0:
        return TokenTree.root(text[-1], 1), [text]
    texts = [text]
    parents = [-1]
    for node in range(1 + width):
        for token in children(texts[node], sampling, width):
            texts.append((*texts[node], token))
            parents.append(node)
    tree = TokenTree.root(text[-1], len(texts), max_depth=2)
    for nodes in (slice(1, 1 + width), slice(1 + width, None)):
        tokens = [each[-1] for each in texts[nodes]]
        tree.grow(torch.tensor(parents[nodes]), torch.tensor(tokens), torch.full((len(tokens),), -1.0))
    return tree, texts


def decode(sampling: SamplingConfig, width: int) -> tuple[Text, int]:
    """The text after the prompt, and the number of steps; width 0 is plain decoding."""
    text = PROMPT
    num_steps = 0
    while len(text) < len(PROMPT) + NUM_TOKENS:
        tree, texts = tree_after(text, sampling, width)
        logits_KV = torch.stack([target(each) for each in texts])
        text += tuple(accept(tree, logits_KV, len(text) - 1, sampling).tokens)
        num_steps += 1
    return text[len(PROMPT) : len(PROMPT) + NUM_TOKENS], num_steps


def seeded(sampling: SamplingConfig, seed: int) -> SamplingConfig:
    return SamplingConfig(
        temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, seed=seed
    )


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_text_of_a_seed_is_that_of_plain_decoding(sampling: SamplingConfig) -> None:
    num_steps: Counter[int] = Counter()
    for seed in range(60):
        plain, _ = decode(seeded(sampling, seed), 0)
        for width in (1, 2):
            text, steps = decode(seeded(sampling, seed), width)
            assert text == plain
            num_steps[width] += steps
    assert num_steps[2] < num_steps[1] < 60 * NUM_TOKENS  # the trees were of use


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_over_seeds_the_first_tokens_have_the_target_s_distribution(sampling: SamplingConfig) -> None:
    """Also the second token, which the walk reaches only through the tree."""
    seen: Counter[Text] = Counter()
    for seed in range(NUM_SEEDS):
        own = seeded(sampling, seed)
        tree, texts = tree_after(PROMPT, own, 2)
        logits_KV = torch.stack([target(each) for each in texts])
        tokens = accept(tree, logits_KV, len(PROMPT) - 1, own).tokens
        if len(tokens) == 1:
            after = PROMPT + tuple(tokens)
            plain = TokenTree.root(after[-1], 1)
            tokens = [*tokens, *accept(plain, target(after)[None], len(after) - 1, own).tokens]
        seen[tuple(tokens[:2])] += 1
    probability = joint(sampling)
    likely = [pair for pair, share in probability.items() if share * NUM_SEEDS >= 5]
    observed = [seen[pair] for pair in likely]
    expected = [probability[pair] * NUM_SEEDS for pair in likely]
    rest = NUM_SEEDS - sum(expected)
    if rest >= 5:
        observed.append(NUM_SEEDS - sum(observed))
        expected.append(rest)
    else:
        expected = [each * sum(observed) / sum(expected) for each in expected]
    assert stats.chisquare(observed, expected).pvalue > 1e-3
    assert all(probability[pair] > 0 for pair in seen)


def joint(sampling: SamplingConfig) -> dict[Text, float]:
    """The probability of every two tokens after the prompt."""
    first = shares(target, PROMPT, sampling)
    return {
        (one, two): first[one] * second
        for one in range(VOCAB)
        for two, second in enumerate(shares(target, (*PROMPT, one), sampling))
    }


def shares(model: Callable[[Text], Tensor], text: Text, sampling: SamplingConfig) -> list[float]:
    probabilities: list[float] = process_logits(model(text)[None], sampling).softmax(-1)[0].tolist()
    return probabilities
