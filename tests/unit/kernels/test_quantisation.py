"""Quantised weights are near the weights, and operators on them have the bits of the reference.

Shapes: O = output features, I = input features, R = rows, G = groups, K = weights of a group.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from yggdrasil.kernels.linear import PackedLinear, gated_reference, pack_weight, reference
from yggdrasil.kernels.quantisation import BITS, GROUP, quantise_rows, quantise_weight, unpack_quantised
from yggdrasil.kernels.threads import get_num_threads, set_num_threads
from yggdrasil.layout import READ
from yggdrasil.models.packing import empty_meta

DTYPES = (torch.bfloat16, torch.float32)
SHAPES = ((1, 1), (17, 33), (48, 31), (100, 70), (33, 1000), (600, 352))  # (out_features, in_features)
WIDTHS = tuple(range(1, 65))


pytestmark = pytest.mark.usefixtures("kernels")


def product(x: Tensor, packed: Tensor, bias_O: Tensor | None, out_features: int) -> Tensor:
    out: Tensor = torch.ops.ygg.packed_linear(x, packed, bias_O, out_features)
    return out


@pytest.mark.parametrize("bits", BITS.values())
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_a_quantised_weight_is_off_by_half_a_step_at_most(
    out_features: int, in_features: int, bits: int
) -> None:
    weight_OI = torch.randn(out_features, in_features)
    value_OGK, scale_OG = unpack_quantised(quantise_weight(weight_OI, bits))
    near_OI = (value_OGK * scale_OG[..., None]).flatten(1)
    assert not near_OI[out_features:].any()
    assert not near_OI[:, in_features:].any()
    half_step_OI = (scale_OG / 2).repeat_interleave(GROUP[bits], dim=1)[:out_features, :in_features]
    # scales are rounded to bf16, which may cut the largest weight by one part in 512
    cut_OI = weight_OI.abs() / 512
    assert ((near_OI[:out_features, :in_features] - weight_OI).abs() <= half_step_OI + cut_OI).all()


@pytest.mark.parametrize("bits", BITS.values())
def test_weights_near_16_levels_are_off_by_half_a_step_of_their_largest_at_most(bits: int) -> None:
    number_OI = torch.randint(-8, 8, (64, 512)).float()
    weight_OI = number_OI * (1 + (torch.rand(64, 512) - 0.5) / 60)
    weight_OI[0, : GROUP[bits]] = 0
    weight_OI[0, :2] = torch.tensor([1.0, 0.8823])
    value_OGK, scale_OG = unpack_quantised(quantise_weight(weight_OI, bits))
    near_OI = (value_OGK * scale_OG[..., None]).flatten(1)
    largest_OG = weight_OI.unflatten(1, (-1, GROUP[bits])).abs().amax(dim=-1)
    half_step_OI = (largest_OG / (2 ** (bits - 1) - 1) / 2).repeat_interleave(GROUP[bits], dim=1)
    # the scale's own rounding, of the largest weight by one part in 512
    cut_OI = near_OI.abs() / 500
    assert ((near_OI - weight_OI).abs() <= half_step_OI + cut_OI).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("levels", ((-8, 7), (-7, 7), (-3, 2), (0, 1)))
def test_weights_of_16_levels_keep_their_numbers(levels: tuple[int, int], dtype: torch.dtype) -> None:
    """As those of a checkpoint of 4 bits, with an fp16 scale for 128 of them."""
    number_OI = torch.randint(levels[0], levels[1] + 1, (50, 384))
    scale_OI = (torch.rand(50, 3) + 0.01).half().float().repeat_interleave(128, dim=1)
    weight_OI = (number_OI * scale_OI).to(dtype)
    value_OGK, step_OG = unpack_quantised(quantise_weight(weight_OI, 4))
    near_OI = (value_OGK * step_OG[..., None]).flatten(1)[:50]
    torch.testing.assert_close(near_OI, number_OI * scale_OI, rtol=2**-7, atol=0)
    # a group without its largest levels may have a multiple of the step
    multiple_OI = number_OI / value_OGK.flatten(1)[:50].where(number_OI != 0, 1)
    assert torch.equal(multiple_OI, multiple_OI.round())


def test_a_group_of_other_numbers_is_rounded_to_its_largest() -> None:
    weight_OI = torch.randn(64, 512)
    _, scale_OG = unpack_quantised(quantise_weight(weight_OI, 4))
    largest_OG = weight_OI.unflatten(1, (-1, GROUP[4])).abs().amax(dim=-1)
    assert torch.equal(scale_OG, (largest_OG / 7).bfloat16().float())


@pytest.mark.parametrize(("name", "bytes_each"), [("int8", 1.03125), ("int4", 0.5625)])
def test_a_scale_of_two_bytes_is_stored_for_every_group(name: str, bytes_each: float) -> None:
    packed = quantise_weight(torch.randn(64, 256), BITS[name])
    assert packed.nbytes == 64 * 256 * bytes_each


def test_the_layout_is_as_documented() -> None:
    """One group read by hand: a scale, and the weight of column 3, place 6 in both formats."""
    weight_OI = torch.zeros(16, 32)
    weight_OI[3, 0] = 127.0
    weight_OI[3, 6] = -5.0
    [[int8]] = quantise_weight(weight_OI, 8).view(torch.uint8).tolist()
    assert int.from_bytes(bytes(int8[6:8]), "little") << 16 == 0x3F800000  # 1.0
    # line 1 has the places 4 to 7
    assert int8[32 + 64 + 3 * 4 + 2] == 128 - 5
    weight_OI[3, 0] = 7.0
    [[int4]] = quantise_weight(weight_OI, 4).view(torch.uint8).tolist()
    assert int4[32 + 3 * 4 + 2] == (8 - 5) << 4 | 8


def test_rows_round_to_whole_numbers_up_to_127() -> None:
    x_RI = torch.randn(20, 70)
    x_RI[3] = 0.0
    value_RGK, scale_RG = quantise_rows(x_RI, 32)
    assert torch.equal(value_RGK, value_RGK.round())
    assert value_RGK.abs().amax(dim=-1)[torch.arange(20) != 3].eq(127).all()
    assert not value_RGK[3].any()
    error_RI = (value_RGK * scale_RG[..., None]).flatten(1)[:, :70] - x_RI
    assert error_RI.abs().max() <= 0.51 * scale_RG.max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS.values())
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_an_operator_has_the_bits_of_the_reference(
    out_features: int, in_features: int, bits: int, dtype: torch.dtype
) -> None:
    packed = quantise_weight(torch.randn(out_features, in_features), bits)
    bias_O = torch.randn(out_features).to(dtype)
    x = torch.randn(max(WIDTHS), in_features).to(dtype)
    for bias in (None, bias_O):
        expected = reference(x, packed, bias, out_features)
        for width in WIDTHS:
            assert torch.equal(product(x[:width], packed, bias, out_features), expected[:width]), (
                f"width {width}"
            )


@pytest.mark.parametrize("bits", BITS.values())
def test_rows_do_not_depend_on_threads(bits: int) -> None:
    packed = quantise_weight(torch.randn(1200, 704), bits)
    x = torch.randn(64, 704).bfloat16()
    expected = reference(x, packed, None, 1200)
    num_threads = get_num_threads()
    try:
        for threads in (1, 2, 3):
            set_num_threads(threads)
            for width in (1, 9, 64):
                assert torch.equal(product(x[:width], packed, None, 1200), expected[:width])
    finally:
        set_num_threads(num_threads)


@pytest.mark.parametrize("signs", ((1, 1), (1, -1), (-1, 1), (-1, -1)))
@pytest.mark.parametrize("bits", BITS.values())
def test_sums_of_the_largest_numbers_do_not_overflow(bits: int, signs: tuple[int, int]) -> None:
    of_weight, of_x = signs
    largest = (1 << (bits - 1)) - 1
    weight_OI = torch.full((20, 96), float(largest * of_weight))
    weight_OI[:, :: GROUP[bits]] = of_weight  # otherwise a group of four bits has a single level
    packed = quantise_weight(weight_OI, bits)
    value_OGK, _ = unpack_quantised(packed)
    assert (value_OGK.abs() == largest).sum() == 20 * (96 - value_OGK.shape[1])
    x = torch.full((9, 96), float(of_x))
    out = product(x, packed, None, 20)
    assert torch.equal(out, reference(x, packed, None, 20))
    torch.testing.assert_close(out, x @ weight_OI.T, rtol=0.01, atol=0)


@pytest.mark.parametrize("value", (0.0, 1e-38, 1e30))
def test_numbers_of_any_size_have_the_bits_of_the_reference(value: float) -> None:
    packed = quantise_weight(torch.randn(40, 64), 8)
    x = torch.randn(5, 64)
    x[2] = value
    x[3, 40] = value
    assert torch.equal(product(x, packed, None, 40), reference(x, packed, None, 40))


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize("bits", BITS.values())
def test_nan_and_inf_stay_in_their_row(bits: int, value: float) -> None:
    packed = quantise_weight(torch.randn(50, 70), bits)
    x = torch.randn(20, 70)
    clean = product(x, packed, None, 50)
    x[7, 69] = value
    out = product(x, packed, None, 50)
    assert not out[7].isfinite().any()
    others = torch.arange(20) != 7
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS.values())
def test_layers_side_by_side_have_the_bits_of_each_layer(bits: int, dtype: torch.dtype) -> None:
    sizes = [48, 20, 16, 33]
    weights = [quantise_weight(torch.randn(size, 70), bits) for size in sizes]
    x = torch.randn(13, 70).to(dtype)
    together = torch.ops.ygg.packed_linears(x, weights, [None] * 4, sizes)
    each = [reference(x, packed, None, size) for packed, size in zip(weights, sizes, strict=True)]
    assert torch.equal(together, torch.cat(each, dim=-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS.values())
@pytest.mark.parametrize("out_features", (1, 33, 150))
def test_rows_of_a_gated_layer_agree_with_the_reference_at_every_width(
    out_features: int, bits: int, dtype: torch.dtype
) -> None:
    gate, up = (quantise_weight(torch.randn(out_features, 70) / 8, bits) for _ in range(2))
    bias_O = torch.randn(out_features).to(dtype)
    arguments = (gate, bias_O, up, None, out_features)
    x = torch.randn(64, 70).to(dtype)
    whole = torch.ops.ygg.gated_linear(x, *arguments)
    # the exponential is torch's for vectors here, and its scalar one at the end of torch's own loop
    step = {torch.bfloat16: 2**-7, torch.float32: 2**-20}[dtype]
    torch.testing.assert_close(whole, gated_reference(x, *arguments), rtol=step, atol=step)
    for width in WIDTHS:
        assert torch.equal(torch.ops.ygg.gated_linear(x[:width], *arguments), whole[:width])


@pytest.mark.parametrize("bits", BITS.values())
@pytest.mark.parametrize("read", ([], [0], [2, 3, 4], [1, 9, 20]))
def test_rows_that_are_read_have_the_bits_of_the_whole_layer(read: list[int], bits: int) -> None:
    packed = quantise_weight(torch.randn(50, 96), bits)
    x_NI = torch.randn(21, 96).bfloat16()
    meta_NM = empty_meta(21, 3)
    meta_NM[read, READ] = 1
    out = torch.ops.ygg.read_linear(x_NI, meta_NM, packed, None, 50)
    assert torch.equal(out[read], reference(x_NI, packed, None, 50)[read])


def test_a_weight_of_another_shape_or_format_is_refused() -> None:
    packed = quantise_weight(torch.randn(32, 64), 4)
    with pytest.raises(RuntimeError, match="packs to"):
        product(torch.randn(1, 96), packed, None, 32)
    with pytest.raises(RuntimeError, match="takes one format"):
        torch.ops.ygg.packed_linears(
            torch.randn(1, 64), [packed, quantise_weight(torch.randn(32, 64), 8)], [None] * 2, [32, 32]
        )
    with pytest.raises(RuntimeError, match="takes one format"):
        torch.ops.ygg.gated_linear(
            torch.randn(1, 64), packed, None, pack_weight(torch.randn(32, 64)), None, 32
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", BITS)
def test_a_quantised_module_is_near_the_linear_layer(weights: str, dtype: torch.dtype) -> None:
    linear = nn.Linear(256, 50, dtype=dtype)
    layer = PackedLinear.from_linear(linear, weights=weights)
    x = torch.randn(9, 256).to(dtype)
    expected = linear(x).detach().float()
    error = (layer(x).float() - expected).norm() / expected.norm()
    assert error < {"int8": 0.02, "int4": 0.12}[weights]
