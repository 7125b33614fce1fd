"""Coupled drafting: the operator against its specification, and what the shared noise does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from yggdrasil.config import SamplingConfig
from yggdrasil.layout import READ_BEST, READ_WIDE
from yggdrasil.offline.forest import coupled_on_host
from yggdrasil.step.coupling import FORBIDDEN, LOWEST_PATH, MIN_SCORE, coupled, noise_of, read_of
from yggdrasil.step.platt import PlattScale
from yggdrasil.step.sampling import choose_tokens

pytestmark = pytest.mark.usefixtures("kernels")

VOCAB = 40
SAMPLINGS = st.builds(
    SamplingConfig,
    temperature=st.sampled_from((1e-40, 0.1, 0.8, 1.0, 5.0)),
    top_k=st.sampled_from((0, 0, 1, 5, 50)),
    top_p=st.sampled_from((1.0, 1.0, 0.9, 0.3)),
    min_p=st.sampled_from((0.0, 0.0, 0.05)),
    seed=st.integers(0, 2**63 - 1),
)


def drafted(logits_NV: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The `num` likeliest tokens of every row and their log-probabilities."""
    best = logits_NV.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    return best.indices[:, :num].contiguous(), best.values[:, :num].contiguous()


@settings(max_examples=300, deadline=None)
@given(
    num=st.integers(1, VOCAB),
    spread=st.sampled_from((0.0, 0.1, 3.0, 30.0)),
    positions=st.lists(st.integers(1, 5000), min_size=1, max_size=5),
    sampling=SAMPLINGS,
)
def test_the_operator_equals_its_specification(
    num: int, spread: float, positions: list[int], sampling: SamplingConfig
) -> None:
    generator = torch.Generator().manual_seed(sampling.seed % 1000)
    logits_NV = torch.randn(len(positions), VOCAB, generator=generator) * spread
    tokens_NM, log_probs_NM = drafted(logits_NV, num)
    noise_NM = noise_of(sampling, positions, VOCAB, "cpu").gather(1, tokens_NM)
    for count in {1, min(8, num), num}:
        tokens, log_probs = coupled(tokens_NM, log_probs_NM, noise_NM, sampling, count)
        same_tokens, same_log_probs = coupled_on_host(tokens_NM, log_probs_NM, positions, sampling, count)
        assert torch.equal(tokens, same_tokens)
        torch.testing.assert_close(log_probs, same_log_probs, rtol=1e-6, atol=1e-6)
        assert bool((log_probs[:, :-1] >= log_probs[:, 1:]).all())


@pytest.mark.parametrize(
    "filters", ({}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9}), ids=str
)
def test_a_draft_equal_to_the_target_is_always_accepted(filters: dict[str, float]) -> None:
    """With the noise of another position it is not: the test would notice a broken coupling."""
    logits_NV = torch.randn(300, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    tokens_NM, log_probs_NM = drafted(logits_NV, VOCAB)
    agreed = {0: 0, 1: 0}
    for row in range(len(logits_NV)):
        sampling = SamplingConfig(temperature=0.9, seed=row, **filters)  # type: ignore[arg-type]
        one = slice(row, row + 1)
        [target] = choose_tokens(logits_NV[one], [7], torch.zeros(1, dtype=torch.int64), sampling).token_K
        for shift in agreed:
            noise_NM = noise_of(sampling, [7 + shift], VOCAB, "cpu").gather(1, tokens_NM[one])
            tokens, _ = coupled(tokens_NM[one], log_probs_NM[one], noise_NM, sampling, 1)
            agreed[shift] += int(tokens[0, 0] == target)
    assert agreed[0] == len(logits_NV)
    assert agreed[1] < 0.8 * len(logits_NV)


def test_shares_are_those_of_the_perturbed_scores() -> None:
    sampling = SamplingConfig(temperature=0.5, seed=3)
    logits_NV = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2))
    tokens_NM, log_probs_NM = drafted(logits_NV, VOCAB)
    noise_NV = noise_of(sampling, [4, 5], VOCAB, "cpu")
    tokens, log_probs = coupled(tokens_NM, log_probs_NM, noise_NV.gather(1, tokens_NM), sampling, VOCAB)
    expected_NV = (logits_NV.double() + 0.5 * noise_NV.double()).log_softmax(-1)
    torch.testing.assert_close(log_probs.double(), expected_NV.gather(1, tokens), rtol=1e-5, atol=1e-5)


def test_a_candidate_that_a_filter_drops_comes_last_and_stays_finite() -> None:
    sampling = SamplingConfig(temperature=1.0, top_k=2, seed=5)
    tokens_NM, log_probs_NM = drafted(torch.randn(1, VOCAB), 8)
    noise_NM = noise_of(sampling, [1], VOCAB, "cpu").gather(1, tokens_NM)
    tokens, log_probs = coupled(tokens_NM, log_probs_NM, noise_NM, sampling, 4)
    assert set(tokens[0, :2].tolist()) == set(tokens_NM[0, :2].tolist())
    assert log_probs[0, 2:].tolist() == [MIN_SCORE, MIN_SCORE]


@pytest.mark.parametrize("temperature", (0.0, 1.0, 5.0))
def test_a_forbidden_candidate_has_no_share_and_stays_forbidden(temperature: float) -> None:
    """In both forms, with filters, and after the scale of edges."""
    sampling = SamplingConfig(temperature=temperature, top_k=4 if temperature else 0, seed=5)
    tokens_NM, log_probs_NM = drafted(torch.randn(2, VOCAB), 8)
    log_probs_NM[:, 5:] = FORBIDDEN
    log_probs_NM[1] = FORBIDDEN
    noise_NM = noise_of(sampling, [1, 2], VOCAB, "cpu").gather(1, tokens_NM) * (temperature > 0)
    tokens, log_probs = coupled(tokens_NM, log_probs_NM, noise_NM, sampling, 8)
    own = [sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed]
    on_host, _ = torch.ops.ygg.coupled(log_probs_NM, tokens_NM, [1, 2], *own, 8)
    torch.testing.assert_close(log_probs, on_host, rtol=1e-6, atol=1e-6)
    is_forbidden = torch.isin(tokens, tokens_NM[0, 5:])
    is_forbidden[1] = True
    assert torch.equal(log_probs < LOWEST_PATH, is_forbidden)
    assert bool((PlattScale(0.05, 3.0).logs(log_probs)[is_forbidden] < LOWEST_PATH).all())
    assert log_probs[0].exp().sum() == pytest.approx(1.0)


def test_greedy_text_is_not_coupled() -> None:
    tokens_NM, log_probs_NM = drafted(torch.randn(2, VOCAB), 8)
    greedy = SamplingConfig()
    assert coupled_on_host(tokens_NM, log_probs_NM, [1, 2], greedy, 4) == (tokens_NM, log_probs_NM)
    assert (read_of(greedy), read_of(SamplingConfig(temperature=0.1))) == (READ_BEST, READ_WIDE)
