"""Compression loses no bit, and layers with compressed weights return the bits of the packed ones.

Shapes: O = output features, I = input features.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from yggdrasil.kernels.compression import compress_weight, decompress_weight
from yggdrasil.kernels.linear import PackedLinear, gated_reference, pack_weight, reference
from yggdrasil.kernels.threads import get_num_threads, set_num_threads

SHAPES = ((5, 3), (16, 32), (33, 70), (80, 320), (600, 352))  # (out_features, in_features)
WIDTHS = (1, 2, 7, 16, 17, 32, 40, 48, 64, 100, 128, 200)  # every body of linear.cpp


def normal(out_features: int, in_features: int) -> Tensor:
    return torch.randn(out_features, in_features).mul_(0.02).bfloat16()


def any_bits(out_features: int, in_features: int) -> Tensor:
    """Infinities, NaNs and subnormal numbers among them: most upper bytes are escapes."""
    return torch.randint(-(2**15), 2**15, (out_features, in_features), dtype=torch.int16).view(
        torch.bfloat16
    )


def zeros(out_features: int, in_features: int) -> Tensor:
    return torch.zeros(out_features, in_features, dtype=torch.bfloat16)


def spread(out_features: int, in_features: int) -> Tensor:
    """Finite numbers of thirty octaves: a panel has some escapes in every tile."""
    return (
        torch.randn(out_features, in_features)
        .mul_(torch.randint(-15, 15, (out_features, in_features)).exp2())
        .bfloat16()
    )


KINDS = (normal, any_bits, zeros, spread)


pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("out_features", "in_features"), (*SHAPES, (16, 0)))
def test_decompressing_gives_every_bit_back(
    out_features: int, in_features: int, kind: Callable[[int, int], Tensor]
) -> None:
    packed = pack_weight(kind(out_features, in_features))
    again = decompress_weight(compress_weight(packed), packed.shape[1])
    assert again.shape == packed.shape
    assert torch.equal(again.view(torch.int16), packed.view(torch.int16))


def test_normal_weights_take_three_quarters_of_their_bytes() -> None:
    packed = pack_weight(normal(256, 2048))
    assert compress_weight(packed).nbytes / packed.nbytes == pytest.approx(0.75, abs=0.01)


def test_the_layout_is_as_documented() -> None:
    """One panel of two tiles, read by hand: the table, a lower byte, two codes and an escape."""
    weight_OI = torch.full((16, 64), 1.0).bfloat16()  # 0x3f80
    weight_OI[3, 1] = 2.5  # 0x4020: line 0, weight 7
    # one upper byte more, with lower bytes of all kinds
    weight_OI[:, 32:48] = torch.arange(2.0**-100, 2.0**-99, 2.0**-107).bfloat16()[:16]
    for index in range(14):
        # fourteen further upper bytes, once each: with the three above one too many
        weight_OI[index, 50] = 2.0 ** (10 + 2 * index)
    [row] = compress_weight(pack_weight(weight_OI)).tolist()
    table = row[:16]
    num_escapes = int.from_bytes(bytes(row[16:20]), "little")
    assert table[:2] == [0x3F, 0x0D]
    assert num_escapes == 1
    tile = row[64 : 64 + 768]
    # weight 7 of line 0 comes after the first seven of its line; eight of the upper line follow
    assert tile[7] == 0x20
    assert table[tile[512 + 7] & 15] == 0x40
    # Line 2 is in the second pair of the first four: its codes are upper halves of the same bytes.
    assert {code >> 4 for code in tile[512:576]} == {0}
    place, upper = divmod(int.from_bytes(bytes(row[64 + 2 * 768 : 64 + 2 * 768 + 4]), "little"), 256)
    words = pack_weight(weight_OI).view(torch.uint8).flatten()
    assert words[2 * place + 1] == upper
    assert upper not in table


@pytest.mark.parametrize("kind", (normal, zeros, spread))
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_a_layer_returns_the_bits_of_the_uncompressed_one(
    out_features: int, in_features: int, bias: bool, kind: Callable[[int, int], Tensor]
) -> None:
    packed = pack_weight(kind(out_features, in_features))
    bias_O = torch.randn(out_features).bfloat16() if bias else None
    compressed = compress_weight(packed)
    for width in WIDTHS:
        x = torch.randn(width, in_features).bfloat16()
        expected = torch.ops.ygg.packed_linear(x, packed, bias_O, out_features)
        assert torch.equal(torch.ops.ygg.packed_linear(x, compressed, bias_O, out_features), expected), (
            f"width {width}"
        )


@pytest.mark.parametrize("width", WIDTHS)
def test_fused_layers_return_the_bits_of_the_uncompressed_ones(width: int) -> None:
    gate, up = (pack_weight(kind(150, 352)) for kind in (normal, spread))
    x = torch.randn(width, 352).bfloat16()
    gated = torch.ops.ygg.gated_linear(x, gate, None, up, None, 150)
    assert torch.equal(
        torch.ops.ygg.gated_linear(x, compress_weight(gate), None, compress_weight(up), None, 150), gated
    )
    together = torch.ops.ygg.packed_linears(x, [gate, up], [None, None], [150, 150])
    for weights in (
        [compress_weight(gate), up],
        [gate, compress_weight(up)],
        [compress_weight(gate), compress_weight(up)],
    ):
        assert torch.equal(torch.ops.ygg.packed_linears(x, weights, [None, None], [150, 150]), together)


def test_the_references_take_compressed_weights() -> None:
    gate = pack_weight(normal(40, 70))
    up = pack_weight(normal(40, 70))
    x = torch.randn(3, 70).bfloat16()
    assert torch.equal(reference(x, compress_weight(gate), None, 40), reference(x, gate, None, 40))
    assert torch.equal(
        gated_reference(x, compress_weight(gate), None, compress_weight(up), None, 40),
        gated_reference(x, gate, None, up, None, 40),
    )


def test_rows_do_not_depend_on_threads() -> None:
    compressed = compress_weight(pack_weight(spread(600, 352)))
    x = torch.randn(20, 352).bfloat16()
    num_threads = get_num_threads()
    try:
        set_num_threads(1)
        one = torch.ops.ygg.packed_linear(x, compressed, None, 600)
        set_num_threads(3)
        assert torch.equal(torch.ops.ygg.packed_linear(x, compressed, None, 600), one)
    finally:
        set_num_threads(num_threads)


def test_a_layer_that_does_not_shrink_stays_packed() -> None:
    layers = {kind: nn.Linear(352, 64, bias=False, dtype=torch.bfloat16) for kind in (normal, any_bits)}
    for kind, layer in layers.items():
        layer.weight.data = kind(64, 352)
    assert PackedLinear.from_linear(layers[normal], compress=True).packed.dtype == torch.uint8
    assert PackedLinear.from_linear(layers[any_bits], compress=True).packed.dtype == torch.bfloat16


def test_compressed_weights_of_another_shape_are_refused() -> None:
    compressed = compress_weight(pack_weight(normal(32, 64)))
    with pytest.raises(RuntimeError, match="compressed to rows of bytes"):
        torch.ops.ygg.packed_linear(torch.randn(1, 640).bfloat16(), compressed, None, 32)
    with pytest.raises(RuntimeError, match="x is"):
        torch.ops.ygg.packed_linear(torch.randn(1, 64), compressed, None, 32)
