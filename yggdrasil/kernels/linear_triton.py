"""Linear layers on CUDA with one order of summation for every number of tokens.

```
            k: block 0  1  2 | 3  4  5 | 6  7        partial sums, fp32
16 rows  x  [   split 0      | split 1 | split 2 ]   p0, p1, p2 of every output

combined    ((p0 + p1) + p2) + bias, rounded once
```

So the bits of a row do not depend on the other rows. A product of a tile is always 16 rows by `BLOCK_OUT`
outputs, with k ascending in blocks of `BLOCK_K`. The layer's shape alone sets the number of splits that
share its k: enough programs to keep the memory of a large device busy with 16 rows, and the same number
for 128. cuBLAS picks tiles and splits by the number of rows, so there a token's bits depend on its
neighbours.

The kernels are tested in Triton's interpreter; they have not run on a device yet.

Shapes: R = rows of a tile, O = output features, I = input features. Here K = a block of k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional

from yggdrasil.layout import READ

__all__ = [
    "OrderedLinear",
    "combine_kernel",
    "launch",
    "multiply_kernel",
    "num_splits",
    "reference",
    "register",
]

ROWS = 16  # rows of a tile: the fewest that tensor cores take
BLOCK_OUT = 32
BLOCK_K = 128
BLOCK_COMBINED = 512
ENOUGH_PROGRAMS = 512  # about four for every multiprocessor of a large device
MOST_SPLITS = 8


def num_splits(out_features: int, in_features: int) -> int:
    """Number of programs that share the k of one output: a power of two that depends on the layer alone.

    Example:
        >>> from yggdrasil.kernels.linear_triton import num_splits
        >>> num_splits(4096, 4096), num_splits(11008, 4096), num_splits(32000, 4096), num_splits(768, 768)
        (4, 2, 1, 4)
    """
    splits = 1
    tiles = triton.cdiv(out_features, BLOCK_OUT)
    blocks = triton.cdiv(in_features, BLOCK_K)
    while splits < MOST_SPLITS and tiles * splits < ENOUGH_PROGRAMS and 2 * splits <= blocks:
        splits *= 2
    return splits


def reference(x: Tensor, weight_OI: Tensor, bias: Tensor | None) -> Tensor:
    """The specification of `launch`: sums and bias in fp32, rounded once to the dtype of `x`.

    The order of summation is torch's: equal to rounding, not to the bit.
    """
    out = functional.linear(x.float(), weight_OI.float(), None if bias is None else bias.float())
    return out.to(x.dtype)


@triton.jit
def multiply_kernel(
    x, weight, meta, partial, num_rows, out_features, in_features, blocks_per_split, meta_width,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
    HAS_META: tl.constexpr, READ_COLUMN: tl.constexpr,
):  # fmt: skip
    """One tile of partial sums: ROWS rows, BLOCK_OUT outputs, the blocks of k of one split.

    `program_id(0)` is the tile of rows, `program_id(1)` the tile of outputs, `program_id(2)` the split.
    Programs of one weight tile follow each other, so that further rows find it in the cache. `WIDEN`
    multiplies in fp32, for an interpreter that cannot multiply bf16. With metadata, a tile without a row
    that is read is skipped.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if HAS_META:
        read_R = tl.load(meta + row * meta_width + READ_COLUMN, mask=row < num_rows, other=0)
        if tl.max(read_R) == 0:
            return
    column = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    split = tl.program_id(2)
    lane = tl.arange(0, BLOCK_K)
    x_rows = x + row[:, None].to(tl.int64) * in_features
    weight_rows = weight + column[:, None].to(tl.int64) * in_features
    sum_RO = tl.zeros((ROWS, BLOCK_OUT), tl.float32)
    for block in range(split * blocks_per_split, (split + 1) * blocks_per_split):
        k = block * BLOCK_K + lane  # past the end of k there is nothing to add
        x_RK = tl.load(
            x_rows + k[None, :], mask=(row[:, None] < num_rows) & (k[None, :] < in_features), other=0.0
        )
        weight_OK = tl.load(
            weight_rows + k[None, :],
            mask=(column[:, None] < out_features) & (k[None, :] < in_features),
            other=0.0,
        )
        if WIDEN:
            x_RK = x_RK.to(tl.float32)
            weight_OK = weight_OK.to(tl.float32)
        sum_RO = tl.dot(x_RK, tl.trans(weight_OK), sum_RO, input_precision="ieee")
    place = (split * num_rows + row[:, None]).to(tl.int64) * out_features + column[None, :]
    tl.store(partial + place, sum_RO, mask=(row[:, None] < num_rows) & (column[None, :] < out_features))


@triton.jit
def combine_kernel(
    partial, bias, meta, out, num_rows, out_features, meta_width,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_META: tl.constexpr, READ_COLUMN: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of row `program_id(0)` in the order of the splits, then the bias; round once.

    With metadata, a row that is not read is skipped.
    """
    row = tl.program_id(0)
    if HAS_META:
        is_read = tl.load(meta + row * meta_width + READ_COLUMN)
        if is_read == 0:
            return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < out_features
    sum_O = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        sum_O += tl.load(
            partial + (split * num_rows + row).to(tl.int64) * out_features + column, mask=mask, other=0.0
        )
    if HAS_BIAS:
        sum_O += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * out_features + column, sum_O.to(out.dtype.element_ty), mask=mask)


def launch(
    x: Tensor,
    weight_OI: Tensor,
    bias: Tensor | None,
    meta_NM: Tensor | None = None,
    *,
    wrap: Callable[[Any], Any] = lambda kernel: kernel,
) -> Tensor:
    """x W^T + bias with an order of summation that depends on the layer alone.

    Args:
        x: (..., in_features), bfloat16 or float32.
        weight_OI: (out_features, in_features), contiguous, in the dtype of `x`.
        bias: (out_features) in the dtype of `x`, or None.
        meta_NM: Metadata of the rows: the output of a row that is not read is undefined.
        wrap: Lets the compiler see the kernels.

    Returns:
        (..., out_features) in the dtype of `x`; a row's bits depend neither on the other rows nor on their
        number.

    Cost: two kernels, no sync. Every 16 rows read the weight once, if possible from the device's cache, and
    write and read `num_splits` fp32 values per output.
    """
    out_features, in_features = weight_OI.shape
    rows = x.reshape(-1, in_features).contiguous()
    num_rows = rows.shape[0]
    splits = num_splits(out_features, in_features)
    partial = torch.empty(splits, num_rows, out_features, dtype=torch.float32, device=x.device)
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    has_meta = meta_NM is not None
    meta, meta_width = (meta_NM, meta_NM.shape[1]) if meta_NM is not None else (partial, 0)
    wrap(multiply_kernel)[(triton.cdiv(num_rows, ROWS), triton.cdiv(out_features, BLOCK_OUT), splits)](
        rows, weight_OI, meta, partial, num_rows, out_features, in_features,
        triton.cdiv(triton.cdiv(in_features, BLOCK_K), splits), meta_width,
        ROWS=ROWS, BLOCK_OUT=BLOCK_OUT, BLOCK_K=BLOCK_K, WIDEN=not x.is_cuda,
        HAS_META=has_meta, READ_COLUMN=READ,
    )  # fmt: skip
    wrap(combine_kernel)[(num_rows, triton.cdiv(out_features, BLOCK_COMBINED))](
        partial, partial if bias is None else bias, meta, out, num_rows, out_features, meta_width,
        SPLITS=splits, HAS_BIAS=bias is not None, BLOCK=BLOCK_COMBINED, HAS_META=has_meta, READ_COLUMN=READ,
    )  # fmt: skip
    return out.view(*x.shape[:-1], out_features)


def register() -> None:
    """Define `ygg::linear_cuda` and `ygg::read_linear_cuda`, which show the kernels to the compiler.

    Call once, before a graph is built for CUDA.
    """

    @torch.library.triton_op("ygg::linear_cuda", mutates_args=())
    def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return launch(x, weight, bias, wrap=torch.library.wrap_triton)

    @torch.library.triton_op("ygg::read_linear_cuda", mutates_args=())
    def _(x: Tensor, meta: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return launch(x, weight, bias, meta, wrap=torch.library.wrap_triton)


class OrderedLinear(nn.Module):
    """`nn.Linear` for inference on CUDA; the bits of a row do not depend on the other rows.

    Args:
        linear: This layer takes its parameters, not copies, so that tied weights stay tied and keep their
            names.
    """

    takes_meta: ClassVar = True  # as an output embedding it computes only the rows that are read

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x: Tensor, meta_NM: Tensor | None = None) -> Tensor:
        """x: (..., in_features) -> (..., out_features), in the layer's dtype.

        With metadata, only the rows that are read are computed.
        """
        weight = self.weight, self.bias
        out: Tensor
        if meta_NM is None:
            out = torch.ops.ygg.linear_cuda(x, *weight)
        else:
            out = torch.ops.ygg.read_linear_cuda(x, meta_NM, *weight)
        return out
