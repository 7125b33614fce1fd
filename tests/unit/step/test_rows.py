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

NEXT = {10: (11, 0.6), 11: (12, 0.6), 20: (21, 0.4), 21: (22, 0.4)}  # token: what follows, and how likely


class Scripted:
    """A draft that knows what follows a token."""

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
        says = [NEXT.get(int(token), (0, 1.0)) for token in meta_NM[:, TOKEN]]
        return torch.tensor([[token] for token, _ in says]), torch.tensor(
            [[probability] for _, probability in says]
        ).log()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("platt", "kept"),
    [(UNSCALED, [1, 1]), (PlattScale(1.8, 1.3), [2, 0])],
    ids=("as the draft says", "scaled"),
)
def test_a_batch_s_drafts_are_ordered_by_what_the_target_takes_of_them(
    platt: PlattScale, kept: list[int]
) -> None:
    """Two tokens of 0.6 make 0.36, less than one of 0.4; but of 0.6 the target takes 0.88, twice 0.78, and
    of 0.4 only 0.64.
    """
    rows = [Row(row, DecodeState([root])) for row, root in enumerate((10, 20))]
    chains = draft_rows(Scripted(), rows, [2, 2], [platt] * 2)
    assert [chain.tokens for chain in chains] == [[11, 12], [21, 22]]
    prune_rows(chains, 2)
    assert [len(chain.tokens) for chain in chains] == kept


@pytest.mark.parametrize("most", range(8))
def test_what_is_kept_of_a_batch_is_the_likeliest_and_of_equals_what_is_nearest_to_its_root(
    most: int,
) -> None:
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
def test_rows_of_several_scales_each_get_their_own() -> None:
    platts = [PlattScale(1.8, 1.3), PlattScale(1.8, 1.3), UNSCALED, PlattScale(0.5, 0.0)]
    rows = [Row(row, DecodeState([10])) for row in range(4)]
    chains = draft_rows(Scripted(), rows, [2, 0, 1, 2], platts)
    edge = math.log(0.6)
    for chain, platt, gamma in zip(chains, platts, (2, 0, 1, 2), strict=True):
        assert chain.log_probs == pytest.approx([platt.log(edge) * (depth + 1) for depth in range(gamma)])
