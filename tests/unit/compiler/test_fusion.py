"""The fusion pass merges linear layers with the same input, and only those."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from yggdrasil.compiler.fusion import fuse_linears_
from yggdrasil.kernels.linear import PackedLinear

pytestmark = pytest.mark.usefixtures("kernels")


def packed(in_features: int, out_features: int, *, bias: bool = False) -> PackedLinear:
    return PackedLinear.from_linear(nn.Linear(in_features, out_features, bias=bias))


class Layer(nn.Module):
    """The projections of attention and a gated feed-forward layer, as in decoders."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.query = packed(32, 48, bias=bias)
        self.key = packed(32, 16, bias=bias)
        self.value = packed(32, 16, bias=bias)
        self.gate = packed(48, 80, bias=bias)
        self.up = packed(48, 80, bias=bias)
        self.down = packed(80, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        attended = self.query(x) + torch.cat([self.key(x), self.value(x), self.key(x)], dim=-1)
        return self.down(nn.functional.silu(self.gate(attended)) * self.up(attended)), attended


class GateReadTwice(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        attended = self.query(x)
        gate = self.gate(attended)
        return nn.functional.silu(gate) * self.up(attended), gate


class GatesOfTwoInputs(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        attended = self.query(x)
        return nn.functional.silu(self.gate(attended)) * self.up(attended + 1), attended


class UpFirst(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        attended = self.query(x)
        return self.up(attended) * nn.functional.silu(self.gate(attended)), attended


def fused(
    module: nn.Module, x: Tensor
) -> tuple[Counter[str], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The count of each of our operators after fusion, and the outputs before and after it."""
    exported = torch.export.export(module.eval(), (x,))
    before = exported.module()(x)
    fuse_linears_(exported.graph_module.graph)
    exported.graph_module.recompile()
    names = Counter(
        str(node.target) for node in exported.graph_module.graph.nodes if "ygg." in str(node.target)
    )
    return names, before, exported.module()(x)


@pytest.mark.parametrize("bias", (False, True))
def test_layers_of_one_input_become_one_operator_and_gate_and_up_another(bias: bool) -> None:
    names, before, after = fused(Layer(bias=bias), torch.randn(5, 32))
    assert names == {
        "ygg.packed_linears.default": 1,
        "ygg.gated_linear.default": 1,
        "ygg.packed_linear.default": 1,
    }
    assert torch.equal(after[1], before[1])  # projections keep their bits
    torch.testing.assert_close(after[0], before[0])


def test_the_order_of_the_factors_does_not_matter() -> None:
    names, before, after = fused(UpFirst(), torch.randn(5, 32))
    assert names["ygg.gated_linear.default"] == 1
    torch.testing.assert_close(after[0], before[0])


def test_a_gate_with_another_user_is_not_gated_but_shares_its_input() -> None:
    names, before, after = fused(GateReadTwice(), torch.randn(5, 32))
    assert names == {"ygg.packed_linear.default": 1, "ygg.packed_linears.default": 1}
    assert torch.equal(after[1], before[1])
    torch.testing.assert_close(after[0], before[0])


def test_layers_of_different_inputs_are_not_fused() -> None:
    names, before, after = fused(GatesOfTwoInputs(), torch.randn(5, 32))
    assert names == {"ygg.packed_linear.default": 3}
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))
