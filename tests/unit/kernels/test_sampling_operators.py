"""The operators of kernels/sampling.cpp against step/sampling.py and step/accept.py: the same bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from yggdrasil.config import SamplingConfig
from yggdrasil.step.accept import accept
from yggdrasil.step.sampling import choose_tokens, draw_noise
from yggdrasil.tree import TokenTree

pytestmark = pytest.mark.usefixtures("kernels")

SAMPLINGS = st.builds(
    SamplingConfig,
    temperature=st.sampled_from((1e-31, 1e-3, 0.1, 0.8, 1.0, 5.0)),
    top_k=st.sampled_from((0, 0, 1, 5, 50)),
    top_p=st.sampled_from((1.0, 1.0, 0.9, 0.3)),
    min_p=st.sampled_from((0.0, 0.0, 0.05)),
    seed=st.integers(0, 2**63 - 1),
)
ROOT = TokenTree.root(0, 1)


def followed(
    tree: TokenTree, logits_KV: torch.Tensor, root_pos: int, sampling: SamplingConfig
) -> tuple[list[int], list[int]]:
    token, parent, *_ = tree.arrays
    path, tokens = torch.ops.ygg.follow_sampling(
        logits_KV,
        parent,
        token,
        root_pos,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
    )
    return path, tokens


def next_token(logits_1V: torch.Tensor, position: int, sampling: SamplingConfig) -> int:
    """The token of the specification."""
    first_1 = torch.zeros(1, dtype=torch.int64)
    return int(choose_tokens(logits_1V, [position], first_1, sampling).token_K)


@pytest.mark.parametrize("vocab", (1, 2, 7, 512, 1_000_003))
@pytest.mark.parametrize("seed", (0, 7, 2**63 - 1))
def test_noise_is_that_of_the_specification(vocab: int, seed: int) -> None:
    for position in (0, 1, 5000):
        assert torch.equal(
            torch.ops.ygg.gumbel_noise(seed, position, vocab), draw_noise(seed, position, vocab)
        )


@settings(max_examples=300, deadline=None)
@given(
    vocab=st.sampled_from((1, 3, 7, 64, 500, 6000)),
    spread=st.sampled_from((0.0, 0.1, 3.0, 30.0)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    position=st.integers(1, 5000),
    sampling=SAMPLINGS,
)
def test_a_token_is_that_of_the_specification(
    vocab: int, spread: float, dtype: torch.dtype, position: int, sampling: SamplingConfig
) -> None:
    generator = torch.Generator().manual_seed(sampling.seed % 1000)
    logits_1V = (torch.randn(1, vocab, generator=generator) * spread).to(dtype)
    expected = next_token(logits_1V, position, sampling)
    assert followed(ROOT, logits_1V, position - 1, sampling) == ([0], [expected])


def test_a_large_vocabulary_on_any_number_of_threads_gives_the_same_token() -> None:
    from yggdrasil.kernels.threads import get_num_threads, set_num_threads

    before = get_num_threads()
    generator = torch.Generator().manual_seed(3)
    for seed in range(8):
        sampling = SamplingConfig(temperature=1.5, seed=seed, top_p=0.9 if seed % 2 else 1.0)
        logits_1V = torch.randn(1, 70_001, generator=generator)
        expected = next_token(logits_1V, 9, sampling)
        try:
            for num_threads in (1, 2, 3):
                set_num_threads(num_threads)
                assert followed(ROOT, logits_1V, 8, sampling)[1] == [expected]
        finally:
            set_num_threads(before)


@settings(max_examples=100, deadline=None)
@given(parents=st.lists(st.integers(0, 9), max_size=12), root_pos=st.integers(0, 99), sampling=SAMPLINGS)
def test_a_path_is_that_of_the_specification(
    parents: list[int], root_pos: int, sampling: SamplingConfig
) -> None:
    """Five tokens, so that paths are long."""
    tree = TokenTree.root(0, 1 + len(parents))
    generator = torch.Generator().manual_seed(sampling.seed % 1000)
    for node, parent in enumerate(parents, start=1):
        token = torch.randint(5, (1,), generator=generator)
        tree.grow(torch.tensor([min(parent, node - 1)]), token, torch.tensor([-0.1 * node]))
    logits_KV = torch.randn(len(tree), 5, generator=generator)
    # of two children with one token the lower one counts
    expected = accept(tree, logits_KV, root_pos, sampling)
    assert followed(tree, logits_KV, root_pos, sampling) == (expected.path, expected.tokens)


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_logits_that_are_not_finite_give_no_path(value: float) -> None:
    tree = TokenTree.root(0, 2)
    tree.grow(torch.tensor([0]), torch.tensor([1]), torch.tensor([-0.1]))
    logits_KV = torch.zeros(2, 5)
    logits_KV[1, 3] = value
    for sampling in (SamplingConfig(temperature=0.8), SamplingConfig(temperature=0.8, top_p=0.5)):
        assert followed(tree, logits_KV, 4, sampling) == ([], [])
