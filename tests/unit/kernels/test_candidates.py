"""`ygg::candidates` agrees with its reference, orders ties by token, and treats each row alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from yggdrasil.kernels.candidates import reference
from yggdrasil.layout import READ, READ_WIDE
from yggdrasil.models.packing import empty_meta

pytestmark = pytest.mark.usefixtures("kernels")


def all_read(logits_NV: Tensor) -> Tensor:
    """Metadata of a forward each of whose rows is read."""
    meta_NM = empty_meta(len(logits_NV), 3)
    meta_NM[:, READ] = 1
    return meta_NM


def candidates(logits_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The operator over rows that are all read."""
    log_probs_NC, tokens_NC = torch.ops.ygg.candidates(logits_NV, all_read(logits_NV), count, count)
    return log_probs_NC, tokens_NC


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize(("vocab", "count"), ((1, 1), (5, 5), (15, 3), (16, 16), (333, 8), (4099, 64)))
def test_agrees_with_the_reference(vocab: int, count: int, dtype: torch.dtype) -> None:
    logits_NV = (torch.randn(7, vocab) * 4).to(dtype)  # bfloat16 has many ties
    log_probs, tokens = candidates(logits_NV, count)
    expected_log_probs, expected_tokens = reference(logits_NV, all_read(logits_NV), count, count)
    assert (log_probs.dtype, tokens.dtype) == (torch.float32, torch.int64)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_a_row_that_is_not_read_has_no_candidate(dtype: torch.dtype) -> None:
    logits_NV = torch.randn(9, 333).to(dtype)
    logits_NV[4] = torch.nan  # what an operator leaves where nobody reads
    meta_NM = all_read(logits_NV)
    meta_NM[[0, 4, 5], READ] = 0
    log_probs, tokens = torch.ops.ygg.candidates(logits_NV, meta_NM, 6, 6)
    expected_log_probs, expected_tokens = reference(logits_NV, meta_NM, 6, 6)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=1e-4, atol=1e-4)
    assert log_probs[4].tolist() == [-torch.inf] * 6


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("vocab", (64, 65, 500, 1024, 4099))
def test_a_row_gets_many_candidates_only_if_it_asks_for_them(vocab: int, dtype: torch.dtype) -> None:
    """The many are found by another way, so they are compared with a sort, ties included."""
    logits_NV = (torch.randn(6, vocab) * 4).round().to(dtype)
    meta_NM = all_read(logits_NV)
    meta_NM[1::2, READ] = READ_WIDE
    meta_NM[5, READ] = 0
    log_probs, tokens = torch.ops.ygg.candidates(logits_NV, meta_NM, 64, 3)
    expected_log_probs, expected_tokens = reference(logits_NV, meta_NM, 64, 3)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=1e-4, atol=1e-4)
    assert log_probs.isfinite().sum(dim=1).tolist() == [3, 64, 3, 64, 3, 0]


@pytest.mark.parametrize("vocab", (64, 100, 4099, 152_000))
def test_many_candidates_of_unusual_rows_are_those_of_a_sort(vocab: int) -> None:
    place_V = torch.arange(vocab)
    rising_V = place_V / 1000
    few_V = torch.full((vocab,), -torch.inf)
    few_V[::9] = 1.0
    zeros_V = torch.zeros(vocab).copysign(place_V % 2 - 0.5)
    rows = (rising_V, rising_V.flip(0), -rising_V - 5, (place_V % 7).float(), zeros_V, few_V)
    logits_NV = torch.stack(rows)
    log_probs, tokens = candidates(logits_NV, 64)
    expected_log_probs, expected_tokens = reference(logits_NV, all_read(logits_NV), 64, 64)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=1e-3, atol=1e-3)


def test_logits_may_be_part_of_wider_rows() -> None:
    wide_NV = torch.randn(5, 64)
    part = candidates(wide_NV[:, :40], 7)
    alone = candidates(wide_NV[:, :40].clone(), 7)
    assert all(torch.equal(one, other) for one, other in zip(part, alone, strict=True))


def test_ties_are_ordered_by_token() -> None:
    logits_NV = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert candidates(logits_NV, 5)[1].tolist() == [[1, 3, 5, 2, 4], [0, 1, 2, 3, 4]]


def test_impossible_tokens_are_last_with_probability_zero() -> None:
    logits_NV = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0]])
    log_probs, tokens = candidates(logits_NV, 2)
    assert tokens.tolist() == [[1, 3]]
    torch.testing.assert_close(log_probs.exp(), torch.full((1, 2), 0.5))


def test_probabilities_of_all_tokens_sum_to_one() -> None:
    log_probs, tokens = candidates(torch.randn(3, 50) * 5, 50)
    torch.testing.assert_close(log_probs.exp().sum(dim=1), torch.ones(3))
    assert tokens.sort(dim=1).values.tolist() == [list(range(50))] * 3


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_rows_are_bitwise_independent(dtype: torch.dtype) -> None:
    logits_NV = torch.randn(33, 500).to(dtype)
    together = candidates(logits_NV, 8)
    for rows in (slice(0, 1), slice(4, 9), slice(1, 33)):
        alone = candidates(logits_NV[rows], 8)
        assert all(torch.equal(a, b[rows]) for a, b in zip(alone, together, strict=True))


def test_a_count_outside_the_vocabulary_is_refused() -> None:
    for count in (0, 6):
        with pytest.raises(RuntimeError, match=f"{count} are not in"):
            candidates(torch.zeros(1, 5), count)


def test_candidates_pass_opcheck() -> None:
    logits_NV = torch.randn(3, 40)
    torch.library.opcheck(torch.ops.ygg.candidates.default, (logits_NV, all_read(logits_NV), 4, 2))
