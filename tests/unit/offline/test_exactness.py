"""The check that `ygg compile` runs finds a graph that rounds differently, and only that.

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = head features.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from yggdrasil.compiler.buckets import Menu
from yggdrasil.kv import KVCache, KVShape
from yggdrasil.layout import INDEX, PAGE_LEN, PATH, PREFIX, TOKEN
from yggdrasil.models.packing import empty_meta
from yggdrasil.offline.exactness import inexact_widths

pytestmark = pytest.mark.usefixtures("kernels")


class CountingModel:
    """Logits are a function of the tokens a row sees, in order; some widths add an error to some rows."""

    device = "cpu"
    max_depth = 16
    num_candidates = 0
    graph_ms = 0.0

    def __init__(
        self,
        *,
        wrong_width: int = 0,
        wrong_in_trees_only: bool = False,
        wrong_row: int = 0,
        capacity: int = 128,
    ) -> None:
        self.menu = Menu((2, 4, 32))
        self.prefill_chunk = self.widest = 32
        self.cache = KVCache(
            KVShape(num_layers=1, num_kv_heads=1, head_dim=16, capacity=capacity),
            dtype=torch.float32,
            device="cpu",
        )
        self.wrong = wrong_width, wrong_in_trees_only, wrong_row

    def meta(self, num_tokens: int) -> Tensor:
        return empty_meta(self.menu.bucket(num_tokens), self.max_depth)

    def forward(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        stored_PS = self.cache.storage_PL2GSF[:, 0, 0, 0, :, 0]
        for fields in meta_NM[meta_NM[:, INDEX] >= 0]:
            stored_PS[fields[INDEX] // PAGE_LEN, fields[INDEX] % PAGE_LEN] = fields[TOKEN]
        stored = stored_PS.reshape(-1)
        logits_NV = torch.zeros(len(meta_NM), 50)
        for row, fields in enumerate(meta_NM):
            seen = torch.cat(
                [stored[: fields[PREFIX]], stored[fields[PREFIX] + fields[PATH:][fields[PATH:] >= 0]]]
            )
            logits_NV[row] = torch.arange(50) * (seen * torch.arange(1, len(seen) + 1)).sum()
        width, in_trees_only, wrong_row = self.wrong
        if len(meta_NM) == width and (not in_trees_only or (meta_NM[0, PATH] >= 0)):
            logits_NV[wrong_row] += 1e-3
        return logits_NV, logits_NV


# in a short context the text is shorter, and nothing is stored after the end of the context
@pytest.mark.parametrize("capacity", (16, 32, 128))
def test_graphs_that_agree_to_the_bit_are_all_exact(capacity: int) -> None:
    model = CountingModel(capacity=capacity)
    assert inexact_widths(model, model.menu.sizes) == ()
    assert model.cache.len == 0


@pytest.mark.parametrize("width", (4, 32))
@pytest.mark.parametrize("in_trees_only", (False, True))
def test_a_graph_that_rounds_differently_is_named(width: int, in_trees_only: bool) -> None:
    model = CountingModel(wrong_width=width, wrong_in_trees_only=in_trees_only)
    assert inexact_widths(model, model.menu.sizes) == (width,)


def test_a_row_far_down_the_path_is_looked_at() -> None:
    model = CountingModel(wrong_width=32, wrong_in_trees_only=True, wrong_row=22)
    assert inexact_widths(model, model.menu.sizes) == (32,)
