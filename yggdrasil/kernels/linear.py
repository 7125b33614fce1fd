"""Linear layers on weights packed once; an output row does not depend on the number of rows.

A packed weight holds panels of 16 output columns, and in a panel one line of 16 words per step of k. A word
is 32 bits: one fp32 weight, or two bf16 weights of consecutive k.

            panel 0 (columns 0..15)   panel 1 (columns 16..31)
    step 0  [ c0 | c1 | ... | c15 ]   [ c16 | ... | c31 ]
    step 1  [ c0 | c1 | ... | c15 ]   ...

The layout is the same on every processor, so packed weights can be stored. Those in bf16 can be compressed
(compression.py), and weights of any dtype quantised (quantisation.py). `linear.cpp` holds the operators:
`ygg::packed_linear`, which `reference` specifies; `ygg::read_linear`, the same for the rows that metadata
marks as read; and two that read one `x` once for several weights, `ygg::packed_linears` (outputs side by
side) and `ygg::gated_linear` (`gated_reference`). compiler/fusion.py puts these two into graphs.

Shapes: O = output features, I = input features.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from yggdrasil.kernels.compression import compress_weight, decompress_weight
from yggdrasil.kernels.quantisation import BITS, COLUMNS, product_reference, quantise_weight

__all__ = [
    "COLUMNS",
    "PackedLinear",
    "gated_reference",
    "pack_weight",
    "packed_shape",
    "reference",
    "register",
    "unpack_weight",
]

BF16_PADDING = 32  # k of a bf16 weight is padded to a multiple of this: 16 pairs are one AMX tile
# a weight that keeps a larger share of its bytes, with exponents of all sizes, is not compressed
MOST_COMPRESSED = 0.9


def packed_shape(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """The shape of a packed weight: (panels, steps, 16, weights per word).

    Raises:
        ValueError: the dtype is neither bfloat16 nor float32.
    """
    panels = -(-out_features // COLUMNS)
    if dtype == torch.bfloat16:
        return panels, -(-in_features // BF16_PADDING) * BF16_PADDING // 2, COLUMNS, 2
    if dtype == torch.float32:
        return panels, in_features, COLUMNS, 1
    raise ValueError(
        f"packed weights are torch.bfloat16 or torch.float32, got {dtype}; convert the model first, for "
        "instance with .to(torch.bfloat16)"
    )


def pack_weight(weight_OI: Tensor) -> Tensor:
    """Pack a linear layer's weight into panels.

    Args:
        weight_OI: (out_features, in_features), bfloat16 or float32.

    Returns:
        `packed_shape(out_features, in_features, dtype)`, same dtype, contiguous, zero where padded.

    Raises:
        ValueError: the dtype is neither bfloat16 nor float32.

    Cost: reads and writes the weight about twice; a new tensor, nothing aliased.
    """
    out_features, in_features = weight_OI.shape
    panels, steps, columns, pair = packed_shape(out_features, in_features, weight_OI.dtype)
    padding = (0, steps * pair - in_features, 0, panels * columns - out_features)
    padded_OI = functional.pad(weight_OI, padding) if any(padding) else weight_OI.contiguous()
    # copied word by word; weight by weight takes four times as long
    words = padded_OI.view(panels, columns, steps, pair).view(torch.int32)
    return words.transpose(1, 2).contiguous().view(weight_OI.dtype)


def unpack_weight(packed: Tensor, out_features: int, in_features: int) -> Tensor:
    """Undo `pack_weight`: (out_features, in_features), same dtype, a new tensor."""
    panels, steps, columns, pair = packed.shape
    return (
        packed.transpose(1, 2)
        .reshape(panels * columns, steps * pair)[:out_features, :in_features]
        .contiguous()
    )


def reference(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """The specification of `ygg::packed_linear`: sums and bias in fp32, rounded once to the dtype of `x`.

    Args:
        x: (..., in_features), bfloat16 or float32.
        packed: From `pack_weight`, in the dtype of `x`, or for bfloat16 from `compress_weight`, or from
            `quantise_weight`.
        bias: (out_features) in the dtype of `x`, or None.
        out_features: Columns of the weight before padding.

    Returns:
        (..., out_features) in the dtype of `x`. The order of summation is torch's, so the operator agrees
        to rounding, not to the bit; to the bit if the weight is quantised.
    """
    if packed.dtype == torch.int8:
        sums = product_reference(x, packed, out_features)
        return (sums if bias is None else sums + bias.float()).to(x.dtype)
    weight_OI = unpack_weight(_decompressed(packed, x.shape[-1]), out_features, x.shape[-1])
    out = functional.linear(x.float(), weight_OI.float(), None if bias is None else bias.float())
    return out.to(x.dtype)


def _decompressed(packed: Tensor, in_features: int) -> Tensor:
    if packed.dtype != torch.uint8:
        return packed
    _, steps, _, _ = packed_shape(0, in_features, torch.bfloat16)
    return decompress_weight(packed, steps)


def _widened(packed: Tensor, in_features: int) -> Tensor:
    return packed if packed.dtype == torch.int8 else _decompressed(packed, in_features).float()


def gated_reference(
    x: Tensor, gate: Tensor, gate_bias: Tensor | None, up: Tensor, up_bias: Tensor | None, out_features: int
) -> Tensor:
    """The specification of `ygg::gated_linear`: silu(gate(x)) * up(x) in fp32, rounded once.

    Arguments are those of `reference`.
    """
    weights = (
        (_widened(packed, x.shape[-1]), None if bias is None else bias.float())
        for packed, bias in ((gate, gate_bias), (up, up_bias))
    )
    gates, ups = (reference(x.float(), packed, bias, out_features) for packed, bias in weights)
    return (functional.silu(gates) * ups).to(x.dtype)


def register() -> None:
    """Give the compiler the operators' output shapes; call once, after the library is loaded.

    The last argument of all four is the number of output features, or a list of them.
    """

    def fake(x: Tensor, *others: Any) -> Tensor:
        return x.new_empty((*x.shape[:-1], others[-1]))

    def fake_many(x: Tensor, *others: Any) -> Tensor:
        return x.new_empty((*x.shape[:-1], sum(others[-1])))

    torch.library.register_fake("ygg::packed_linear", fake)
    torch.library.register_fake("ygg::read_linear", fake)
    torch.library.register_fake("ygg::packed_linears", fake_many)
    torch.library.register_fake("ygg::gated_linear", fake)


class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU, with a packed weight.

    The bits of a row do not depend on the other rows.

    Args:
        packed: The weight, from `pack_weight`, `compress_weight` or `quantise_weight`.
        bias: (out_features), or None.

    Cost: one operator, which reads `packed` once from memory for any number of rows; no gradient.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from yggdrasil.kernels import load_kernels
        >>> from yggdrasil.kernels.linear import PackedLinear
        >>> load_kernels()
        >>> layer = PackedLinear.from_linear(nn.Linear(48, 20, dtype=torch.bfloat16))
        >>> x = torch.randn(7, 48, dtype=torch.bfloat16)
        >>> torch.equal(layer(x)[2:3], layer(x[2:3]))
        True
    """

    takes_meta: ClassVar = True  # as an output embedding it computes only the rows that are read

    def __init__(self, in_features: int, out_features: int, packed: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        # parameters, because Inductor copies buffers, which a graph may write to
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, weights: str = "bf16", compress: bool = False) -> Self:
        """Pack `linear`.

        Args:
            weights: "bf16" keeps them, "int8" and "int4" round them.
            compress: Compress weights that are kept if that saves a tenth or more.
        """
        if weights in BITS:
            packed = quantise_weight(linear.weight.detach(), BITS[weights])
        else:
            packed = pack_weight(linear.weight.detach())
            compressed = compress_weight(packed) if compress else packed
            packed = compressed if compressed.nbytes <= MOST_COMPRESSED * packed.nbytes else packed
        bias = None if linear.bias is None else linear.bias.detach().clone()
        return cls(linear.in_features, linear.out_features, packed, bias)

    @classmethod
    def like(cls, linear: nn.Linear) -> Self:
        """A layer in the place of `linear`, whose packed weight is set later."""
        return cls(linear.in_features, linear.out_features, torch.empty(0, device="meta"), linear.bias)

    def forward(self, x: Tensor, meta_NM: Tensor | None = None) -> Tensor:
        """x: (..., in_features) -> (..., out_features), in the layer's dtype.

        With metadata of a forward's N rows, only the rows that are read are computed.
        """
        weight = self.packed, self.bias, self.out_features
        out: Tensor
        if meta_NM is None:
            out = torch.ops.ygg.packed_linear(x, *weight)
        else:
            out = torch.ops.ygg.read_linear(x, meta_NM, *weight)
        return out

    def extra_repr(self) -> str:
        """Sizes and dtype, for `print(model)`."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, packed={self.packed.dtype}"
