"""Drafting for a batch, by hand: chains, and which of their tokens are verified."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from yggdrasil.layout import TOKEN
from yggdrasil.models.packing import empty_meta
from yggdrasil.state import DecodeState, Row
from yggdrasil.step.platt import UNSCALED, PlattScale
from yggdrasil.step.rows import draft_rows, prune_rows

NEXT = {10: (11, 0.6), 11: (12, 0.6), 20: (21, 0.4), 21: (22, 0.4)}  # token: what follows, and how likely


class Scripted:
    """A draft that knows what follows a token."""

    device, max_depth, prefill_chunk, widest, sizes, num_candidates, graph_ms = "cpu", 3, 8, 8, (8,), 1, 0.0

    def meta(self, num_tokens: int) -> Tensor:
        return empty_meta(8, self.max_depth)

    def forward(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        says = [NEXT.get(int(token), (0, 1.0)) for token in meta_NM[:, TOKEN]]
        return torch.tensor([[token] for token, _ in says]), torch.tensor([[probability] for _, probability in says]).log()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("platt", "kept"), [(UNSCALED, [1, 1]), (PlattScale(1.8, 1.3), [2, 0])], ids=("as the draft says", "scaled"))
def test_a_batch_s_drafts_are_ordered_by_what_the_target_takes_of_them(platt: PlattScale, kept: list[int]) -> None:
    """Two tokens of 0.6 make 0.36, less than one of 0.4; but of 0.6 the target takes 0.88, twice 0.78, and of 0.4 only 0.64."""
    rows = [Row(row, DecodeState([root])) for row, root in enumerate((10, 20))]
    chains = draft_rows(Scripted(), rows, [2, 2], [platt] * 2)
    assert [chain.tokens for chain in chains] == [[11, 12], [21, 22]]
    prune_rows(chains, 2)
    assert [len(chain.tokens) for chain in chains] == kept
