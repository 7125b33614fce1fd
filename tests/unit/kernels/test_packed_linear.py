"""The packed linear operator agrees with its reference, and a row's bits do not depend on other rows.

Shapes: O = output features, I = input features.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from yggdrasil.kernels.linear import (
    PackedLinear,
    gated_reference,
    pack_weight,
    packed_shape,
    reference,
    unpack_weight,
)
from yggdrasil.kernels.threads import get_num_threads, set_num_threads
from yggdrasil.layout import READ
from yggdrasil.models.packing import empty_meta

DTYPES = (torch.bfloat16, torch.float32)
# (out_features, in_features)
SHAPES = ((1, 1), (5, 3), (16, 32), (17, 33), (48, 31), (100, 70), (256, 128), (33, 1000), (600, 352))
WIDTHS = (1, 2, 3, 7, 8, 9, 12, 16, 17, 24, 25, 31, 32, 33, 49, 64, 128, 200)


pytestmark = pytest.mark.usefixtures("kernels")


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    out: Tensor = torch.ops.ygg.packed_linear(x, packed, bias, out_features)
    return out


def layer(
    out_features: int, in_features: int, dtype: torch.dtype, bias: bool
) -> tuple[Tensor, Tensor | None]:
    weight_OI = torch.randn(out_features, in_features).to(dtype)
    return pack_weight(weight_OI), torch.randn(out_features).to(dtype) if bias else None


def assert_close(actual: Tensor, expected: Tensor, in_features: int) -> None:
    step = {torch.bfloat16: 2**-8, torch.float32: 2**-18}[actual.dtype]
    torch.testing.assert_close(
        actual.float(), expected.float(), rtol=2 * step, atol=step * in_features**0.5
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_unpacking_a_packed_weight_gives_it_back(
    out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    weight_OI = torch.randn(out_features, in_features).to(dtype)
    packed = pack_weight(weight_OI)
    assert packed.shape == packed_shape(out_features, in_features, dtype)
    assert torch.equal(unpack_weight(packed, out_features, in_features), weight_OI)


def test_a_word_holds_two_bf16_weights_of_one_column() -> None:
    weight_OI = torch.arange(32 * 64, dtype=torch.float32).remainder(251).view(32, 64).to(torch.bfloat16)
    packed = pack_weight(weight_OI)
    panel = 1
    step = 5
    column = 3
    assert (
        packed[panel, step, column].tolist()
        == weight_OI[panel * 16 + column, 2 * step : 2 * step + 2].tolist()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_agrees_with_the_reference(
    out_features: int, in_features: int, bias: bool, dtype: torch.dtype
) -> None:
    packed, bias_O = layer(out_features, in_features, dtype, bias)
    for width in (1, 5, 16, 20, 40):
        x = torch.randn(width, in_features).to(dtype)
        assert_close(
            packed_linear(x, packed, bias_O, out_features),
            reference(x, packed, bias_O, out_features),
            in_features,
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_that_are_exact_in_fp32_round_once(dtype: torch.dtype) -> None:
    packed = pack_weight(torch.randint(-3, 4, (40, 65)).to(dtype))
    x = torch.randint(-3, 4, (21, 65)).to(dtype)
    bias_O = torch.randint(-300, 300, (40,)).to(dtype)
    assert torch.equal(packed_linear(x, packed, bias_O, 40), reference(x, packed, bias_O, 40))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_rows_are_bitwise_independent_of_width(
    out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    packed, bias_O = layer(out_features, in_features, dtype, bias=True)
    x = torch.randn(max(WIDTHS), in_features).to(dtype)
    alone = torch.cat(
        [packed_linear(x[row : row + 1], packed, bias_O, out_features) for row in range(len(x))]
    )
    for width in WIDTHS:
        rows = torch.randperm(len(x))[:width]
        assert torch.equal(packed_linear(x[rows], packed, bias_O, out_features), alone[rows]), (
            f"width {width}"
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_bitwise_independent_of_the_thread_count(dtype: torch.dtype) -> None:
    packed, _ = layer(1200, 704, dtype, bias=False)
    assert packed.nbytes > 2**20  # enough to be shared out
    x = torch.randn(20, 704).to(dtype)
    num_threads = get_num_threads()
    try:
        set_num_threads(1)
        one = packed_linear(x, packed, None, 1200)
        set_num_threads(3)
        three = packed_linear(x, packed, None, 1200)
    finally:
        set_num_threads(num_threads)
    assert torch.equal(one, three)


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize("width", (1, 5, 16, 40))
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_stay_in_their_row(dtype: torch.dtype, width: int, value: float) -> None:
    packed, bias_O = layer(50, 70, dtype, bias=True)
    x = torch.randn(width, 70).to(dtype)
    clean = packed_linear(x, packed, bias_O, 50)
    row = width // 2
    x[row, 69] = value
    out = packed_linear(x, packed, bias_O, 50)
    assert not out[row].isfinite().any()
    others = torch.arange(width) != row
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_dimensions_and_strides_are_kept_apart_from_the_values(dtype: torch.dtype) -> None:
    packed, bias_O = layer(30, 64, dtype, bias=True)
    x = torch.randn(2, 3, 5, 64).to(dtype)
    flat = packed_linear(x.reshape(30, 64), packed, bias_O, 30)
    assert torch.equal(packed_linear(x, packed, bias_O, 30), flat.view(2, 3, 5, 30))
    assert torch.equal(
        packed_linear(x.transpose(0, 2), packed, bias_O, 30), flat.view(2, 3, 5, 30).transpose(0, 2)
    )
    assert packed_linear(x[0, 0, 0], packed, bias_O, 30).shape == (30,)
    assert packed_linear(x[:, :0], packed, bias_O, 30).shape == (2, 0, 5, 30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_input_features_leave_the_bias(dtype: torch.dtype) -> None:
    packed, bias_O = layer(20, 0, dtype, bias=True)
    assert bias_O is not None
    # sums that must not be seen again
    packed_linear(torch.ones(40, 20, dtype=dtype), pack_weight(torch.ones(20, 20, dtype=dtype)), None, 20)
    for width in (3, 40):
        assert torch.equal(
            packed_linear(torch.empty(width, 0, dtype=dtype), packed, bias_O, 20), bias_O.expand(width, 20)
        )


def test_a_weight_of_another_shape_or_dtype_is_refused() -> None:
    packed, _ = layer(32, 64, torch.bfloat16, bias=False)
    with pytest.raises(RuntimeError, match="packs to"):
        packed_linear(torch.randn(1, 96).bfloat16(), packed, None, 32)
    with pytest.raises(RuntimeError, match="x is"):
        packed_linear(torch.randn(1, 64), packed, None, 32)
    with pytest.raises(RuntimeError, match="bias must be"):
        packed_linear(torch.randn(1, 64).bfloat16(), packed, torch.zeros(32), 32)
    with pytest.raises(ValueError, match="packed weights are"):
        pack_weight(torch.zeros(4, 4, dtype=torch.float16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("width", (1, 5, 9, 16, 40))
def test_layers_side_by_side_have_the_bits_of_each_layer(
    width: int, bias: bool, dtype: torch.dtype
) -> None:
    sizes = [48, 20, 16, 33]
    weights, biases = zip(*(layer(size, 70, dtype, bias) for size in sizes), strict=True)
    x = torch.randn(width, 70).to(dtype)
    together = torch.ops.ygg.packed_linears(x, weights, biases, sizes)
    assert torch.equal(
        together,
        torch.cat([packed_linear(x, *each) for each in zip(weights, biases, sizes, strict=True)], dim=-1),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("out_features", (1, 16, 33, 150))
def test_a_gated_layer_agrees_with_its_reference(out_features: int, bias: bool, dtype: torch.dtype) -> None:
    gate = layer(out_features, 70, dtype, bias)
    up = layer(out_features, 70, dtype, bias)
    for width in (1, 7, 8, 20, 40):
        x = torch.randn(width, 70).to(dtype)
        expected = gated_reference(x, *gate, *up, out_features)
        step = {torch.bfloat16: 2**-7, torch.float32: 2**-16}[dtype]
        torch.testing.assert_close(
            torch.ops.ygg.gated_linear(x, *gate, *up, out_features).float(),
            expected.float(),
            rtol=step,
            atol=step,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_features", (33, 600))
def test_rows_of_a_gated_layer_are_bitwise_independent_of_width_and_threads(
    out_features: int, dtype: torch.dtype
) -> None:
    gate = layer(out_features, 352, dtype, bias=True)
    up = layer(out_features, 352, dtype, bias=True)
    x = torch.randn(max(WIDTHS), 352).to(dtype)
    alone = torch.cat(
        [torch.ops.ygg.gated_linear(x[row : row + 1], *gate, *up, out_features) for row in range(len(x))]
    )
    num_threads = get_num_threads()
    try:
        for width, threads in zip(WIDTHS, (1, 2, 3) * len(WIDTHS), strict=False):
            set_num_threads(threads)
            assert torch.equal(
                torch.ops.ygg.gated_linear(x[:width], *gate, *up, out_features), alone[:width]
            ), f"width {width}, {threads} threads"
    finally:
        set_num_threads(num_threads)


def test_a_gated_layer_saturates_where_silu_does() -> None:
    one = pack_weight(torch.eye(2))
    x = torch.tensor([[-200.0, 200.0], [0.0, -1.0]])
    torch.testing.assert_close(
        torch.ops.ygg.gated_linear(x, one, None, one, None, 2), torch.nn.functional.silu(x) * x
    )


def test_lists_that_do_not_fit_are_refused() -> None:
    packed, _ = layer(32, 64, torch.float32, bias=False)
    with pytest.raises(RuntimeError, match="2 weights, 1 biases and 2 sizes"):
        torch.ops.ygg.packed_linears(torch.randn(1, 64), [packed, packed], [None], [32, 32])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", (False, True))
def test_linear_operators_pass_opcheck(bias: bool, dtype: torch.dtype) -> None:
    packed, bias_O = layer(20, 40, dtype, bias)
    x = torch.randn(2, 3, 40).to(dtype)
    torch.library.opcheck(torch.ops.ygg.packed_linear.default, (x, packed, bias_O, 20))
    torch.library.opcheck(
        torch.ops.ygg.packed_linears.default, (x, [packed, packed], [bias_O, None], [20, 20])
    )
    torch.library.opcheck(torch.ops.ygg.gated_linear.default, (x, packed, bias_O, packed, None, 20))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", (False, True))
def test_packed_module_replaces_a_linear(bias: bool, dtype: torch.dtype) -> None:
    linear = nn.Linear(70, 50, bias=bias, dtype=dtype)
    packed = PackedLinear.from_linear(linear)
    x = torch.randn(2, 9, 70).to(dtype)
    assert_close(packed(x), linear(x).detach(), 70)
    assert packed.to("meta")(x.to("meta")).shape == (2, 9, 50)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("read", ([], [0], [6], [2, 3, 4], [0, 5, 6], [1, 9, 20], list(range(21))))
def test_rows_that_are_read_have_the_bits_of_the_whole_layer(read: list[int], dtype: torch.dtype) -> None:
    x_1NI = torch.randn(1, 21, 96).to(dtype)
    layer = PackedLinear.from_linear(nn.Linear(96, 50, dtype=dtype))
    meta_NM = empty_meta(21, 3)
    meta_NM[read, READ] = 1
    assert torch.equal(layer(x_1NI, meta_NM)[0, read], layer(x_1NI)[0, read])


def test_a_row_that_is_not_read_is_not_computed() -> None:
    x = torch.full((4, 32), torch.nan)
    x[1] = 0.0
    layer = PackedLinear.from_linear(nn.Linear(32, 16))
    meta_NM = empty_meta(4, 3)
    meta_NM[1, READ] = 1
    assert layer(x, meta_NM)[1].isfinite().all()


def test_metadata_of_another_forward_is_refused() -> None:
    layer = PackedLinear.from_linear(nn.Linear(32, 16))
    with pytest.raises(RuntimeError, match="every row of x has a row of metadata"):
        layer(torch.zeros(4, 32), empty_meta(3, 3))
