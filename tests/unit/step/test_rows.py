"""Drafting for a batch, by hand: chains, and which of their tokens are verified."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from yggdrasil.layout import TOKEN
from yggdrasil.models.packing import empty_meta
from yggdrasil.state import DecodeState, Row
from yggdrasil.step.platt import UNSCALED, PlattScale
from yggdrasil.step.rows import Chain, draft_rows, prune_rows

NEXT = {
    10: (11, 0.6),
    11: (12, 0.6),
    20: (21, 0.4),
    21: (22, 0.4),
}  # token: the next token and its probability


class Scripted:
    """A draft with a fixed next token after each token."""

    device = "cpu"
    max_depth = 3
    prefill_chunk = 8
    widest = 8
    sizes = (8,)
    num_candidates = 1
    graph_ms = 0.0

    def meta(self, num_tokens: int) -> Tensor:
        return empty_meta(8, self.max_depth)

    def forward(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        following = [NEXT.get(int(token), (0, 1.0)) for token in meta_NM[:, TOKEN]]
        tokens_N1 = torch.tensor([[token] for token, _ in following])
        probabilities_N1 = torch.tensor([[probability] for _, probability in following])
        return tokens_N1, probabilities_N1.log()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("platt", "kept"), [(UNSCALED, [1, 1]), (PlattScale(1.8, 1.3), [2, 0])], ids=("unscaled", "scaled")
)
def test_draft_tokens_of_a_batch_are_ordered_by_scaled_probability(
    platt: PlattScale, kept: list[int]
) -> None:
    """Unscaled, 0.6 * 0.6 = 0.36 is less than 0.4. Scaled, 0.88 * 0.88 = 0.78 is more than 0.64."""
    rows = [Row(row, DecodeState([root])) for row, root in enumerate((10, 20))]
    chains = draft_rows(Scripted(), rows, [2, 2], [platt] * 2)
    assert [chain.tokens for chain in chains] == [[11, 12], [21, 22]]
    prune_rows(chains, 2)
    assert [len(chain.tokens) for chain in chains] == kept


@pytest.mark.parametrize("most", range(8))
def test_the_most_likely_tokens_of_a_batch_are_kept_and_among_equals_the_shallowest(most: int) -> None:
    log_probs = [[-0.1, -0.5, -0.5], [], [-0.5, -0.5], [-0.2, -0.9]]
    places = sorted(
        (-log_prob, depth, index)
        for index, row in enumerate(log_probs)
        for depth, log_prob in enumerate(row)
    )
    chains = [Chain(list(range(len(row))), list(row), len(row)) for row in log_probs]
    prune_rows(chains, most)
    assert [len(chain.tokens) for chain in chains] == [
        sum(index == row for _, _, index in places[:most]) for row in range(4)
    ]
    assert all(
        chain.log_probs == row[: len(chain.tokens)] for chain, row in zip(chains, log_probs, strict=True)
    )


@pytest.mark.usefixtures("kernels")
def test_each_row_uses_its_own_scale() -> None:
    platts = [PlattScale(1.8, 1.3), PlattScale(1.8, 1.3), UNSCALED, PlattScale(0.5, 0.0)]
    rows = [Row(row, DecodeState([10])) for row in range(4)]
    chains = draft_rows(Scripted(), rows, [2, 0, 1, 2], platts)
    edge = math.log(0.6)
    for chain, platt, gamma in zip(chains, platts, (2, 0, 1, 2), strict=True):
        assert chain.log_probs == pytest.approx([platt.log(edge) * (depth + 1) for depth in range(gamma)])
