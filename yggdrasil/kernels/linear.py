"""Linear layers on weights packed once, with output rows that do not depend on how many rows run together.

A packed weight holds panels of 16 output columns, and in a panel one line of 16 words per step of k. A word
is 32 bits: one fp32 weight, or two bf16 weights of consecutive k.

            panel 0 (columns 0..15)   panel 1 (columns 16..31)
    step 0  [ c0 | c1 | ... | c15 ]   [ c16 | ... | c31 ]
    step 1  [ c0 | c1 | ... | c15 ]   ...

The layout is the same on every processor, so packed weights can be stored; those in bf16 also compressed
(compression.py). `linear.cpp` holds the operators: `ygg::packed_linear`, which `reference` specifies;
`ygg::read_linear`, the same for the rows that metadata marks as read; and two that read one `x` once for
several weights, `ygg::packed_linears` (outputs side by side) and `ygg::gated_linear` (`gated_reference`),
which compiler/fusion.py puts into graphs."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from yggdrasil.kernels.compression import compress_weight, decompress_weight

__all__ = [
    "PackedLinear",
    "gated_reference",
    "pack_weight",
    "packed_shape",
    "reference",
    "register",
    "unpack_weight",
]

COLUMNS = 16  # output columns of a panel
BF16_PADDING = 32  # k of a bf16 weight is padded to this: 16 pairs are one AMX tile
# of a weight's bytes; one that takes more, with exponents of all sizes, stays as it is
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
        f"packed weights are torch.bfloat16 or torch.float32, got {dtype}; convert the model first, for instance with .to(torch.bfloat16)"
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
    # copied word by word: weight by weight takes four times as long
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
    """What `torch.ops.ygg.packed_linear` computes, in plain torch: sums and bias in fp32, one rounding to
    the dtype of `x`.

    Args:
        x: (..., in_features), bfloat16 or float32.
        packed: from `pack_weight`, in the dtype of `x`, or from `compress_weight` where `x` is bfloat16.
        bias: (out_features) in the dtype of `x`, or None.
        out_features: columns of the weight before padding.

    Returns:
        (..., out_features) in the dtype of `x`. The order of summation is torch's, so the operator agrees
        to rounding, not to the bit.
    """
    weight_OI = unpack_weight(_decompressed(packed, x.shape[-1]), out_features, x.shape[-1])
    return functional.linear(x.float(), weight_OI.float(), None if bias is None else bias.float()).to(
        x.dtype
    )


def _decompressed(packed: Tensor, in_features: int) -> Tensor:
    is_compressed = packed.dtype == torch.uint8
    return (
        decompress_weight(packed, packed_shape(0, in_features, torch.bfloat16)[1])
        if is_compressed
        else packed
    )


def gated_reference(
    x: Tensor, gate: Tensor, gate_bias: Tensor | None, up: Tensor, up_bias: Tensor | None, out_features: int
) -> Tensor:
    """What `torch.ops.ygg.gated_linear` computes, silu(gate(x)) * up(x), in plain torch and in fp32 until
    one rounding; arguments as in `reference`.
    """
    weights = (
        (_decompressed(packed, x.shape[-1]).float(), None if bias is None else bias.float())
        for packed, bias in ((gate, gate_bias), (up, up_bias))
    )
    gates, ups = (reference(x.float(), packed, bias, out_features) for packed, bias in weights)
    return (functional.silu(gates) * ups).to(x.dtype)


def register() -> None:
    """Tell `torch.export` and `torch.compile` the operator's output shape; call once, after the library of
    kernels is loaded.
    """

    def fake(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
        return x.new_empty((*x.shape[:-1], out_features))

    def fake_many(
        x: Tensor, packed: list[Tensor], bias: list[Tensor | None], out_features: list[int]
    ) -> Tensor:
        return x.new_empty((*x.shape[:-1], sum(out_features)))

    def fake_gated(
        x: Tensor,
        gate: Tensor,
        gate_bias: Tensor | None,
        up: Tensor,
        up_bias: Tensor | None,
        out_features: int,
    ) -> Tensor:
        return x.new_empty((*x.shape[:-1], out_features))

    def fake_read(
        x: Tensor, meta: Tensor, packed: Tensor, bias: Tensor | None, out_features: int
    ) -> Tensor:
        return fake(x, packed, bias, out_features)

    torch.library.register_fake("ygg::packed_linear", fake)
    torch.library.register_fake("ygg::read_linear", fake_read)
    torch.library.register_fake("ygg::packed_linears", fake_many)
    torch.library.register_fake("ygg::gated_linear", fake_gated)


class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU: a packed weight, and rows that are bitwise the same whatever runs
    beside them.

    Args:
        in_features: length of an input row.
        out_features: length of an output row.
        packed: the weight, from `pack_weight` or `compress_weight`.
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

    takes_meta: ClassVar = True  # as an output embedding, for the rows that are read

    def __init__(self, in_features: int, out_features: int, packed: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        # Parameters: of buffers, which a graph may write to, Inductor makes copies.
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, compress: bool = False) -> Self:
        """Pack `linear`, and compress it where that is asked for and makes it smaller by a tenth at least."""
        packed = pack_weight(linear.weight.detach())
        compressed = compress_weight(packed) if compress else None
        if compressed is not None and compressed.nbytes <= MOST_COMPRESSED * packed.nbytes:
            packed = compressed
        return cls(
            linear.in_features,
            linear.out_features,
            packed,
            None if linear.bias is None else linear.bias.detach().clone(),
        )

    @classmethod
    def like(cls, linear: nn.Linear) -> Self:
        """In the place of `linear`; its packed weight is still to be set."""
        return cls(linear.in_features, linear.out_features, torch.empty(0, device="meta"), linear.bias)

    def forward(self, x: Tensor, meta_NM: Tensor | None = None) -> Tensor:
        """x: (..., in_features) -> (..., out_features), in the layer's dtype.

        Args:
            x: Rows.
            meta_NM: Metadata of a forward's N rows: those that are not read are not computed.
        """
        weight = self.packed, self.bias, self.out_features
        linear = torch.ops.ygg.packed_linear
        out: Tensor = (
            linear(x, *weight) if meta_NM is None else torch.ops.ygg.read_linear(x, meta_NM, *weight)
        )
        return out

    def extra_repr(self) -> str:
        """Sizes and dtype, for `print(model)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, packed={self.packed.dtype}"
