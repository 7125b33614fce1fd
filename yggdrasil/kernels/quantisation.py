"""Weights of 8 or 4 bits with a scale for every column and group of k: integer products, exact sums.

A packed weight holds panels of 16 output columns (linear.py), and a panel one row of bytes per group:

    int8    | 16 scales, bf16 | line 0 | line 1 | ... | line 15 |      1056 bytes, 64 weights a column
    int4    | 16 scales, bf16 | lines 0, 1 | ...  | lines 6, 7  |       288 bytes, 32 weights a column
              32                64

A line has a word for every column, and a word the weights of four consecutive k. They are stored without
sign: an int8 weight plus 128, an int4 weight plus 8. Two int4 lines share their bytes: the first one has
the lower halves. A weight is value * scale.

The rows of x are rounded to int8 for each group, too. A group's products are summed in int32, which is
exact in any order. The sums of the groups are scaled and added in fp32, one group after another. So the
bits of a row depend on nothing but the row and the weight, and `product_reference` has the bits of
quantisation.h.

Shapes: O = output features, I = input features, P = panels, G = groups, K = weights of a group. Here
C = columns of a panel, S = lines of a group, J = weights of a word, R = rows of x.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    "BITS",
    "COLUMNS",
    "GROUP",
    "product_reference",
    "quantise_rows",
    "quantise_weight",
    "unpack_quantised",
]

BITS: Final = {"int8": 8, "int4": 4}
GROUP: Final = {8: 64, 4: 32}  # weights along k that share a scale, by their bits
COLUMNS = 16  # output columns of a panel
WORD = 4  # weights of a word
SCALE_BYTES = 2 * COLUMNS
LARGEST_ROUNDED = 127.0  # of a row's numbers; -128 does not occur
MOST_STEPS = 8  # 16 levels are the multiples from -8 to 7 of a step
OFF_STEP = 1 / 120  # of a multiple, relative; the rounding to bf16 of two numbers is 1 / 128
FEW = 4  # weights of a group that are looked at first
NO_SIZE = 1e-30  # rows of smaller numbers count as zeros: their reciprocals are not finite


def quantise_weight(weight_OI: Tensor, bits: int) -> Tensor:
    """Round a linear layer's weight to the nearest multiples of its groups' scales, and pack it.

    In 4 bits, a group that has 16 levels already, as those of a checkpoint of 4 bits have, keeps its whole
    numbers. In 8 bits the nearest multiples are closer than `OFF_STEP` may be.

    Args:
        weight_OI: (out_features, in_features), finite, of any floating type.
        bits: 8 or 4.

    Returns:
        (panels, groups, bytes of a group) int8; zeros where padded.

    Cost: some passes over the weight in fp32; a new tensor.
    """
    out_features, in_features = weight_OI.shape
    group_len = GROUP[bits]
    padding = (0, -in_features % group_len, 0, -out_features % COLUMNS)
    padded_OI = functional.pad(weight_OI.float(), padding)
    weight_OGK = padded_OI.view(padded_OI.shape[0], -1, group_len)
    zero = 1 << (bits - 1)
    scale_OG = weight_OGK.abs().amax(dim=-1) / (zero - 1)
    if bits == BITS["int4"]:
        step_OG = _steps(weight_OGK)
        scale_OG = torch.where(step_OG > 0, step_OG, scale_OG)
    scale_OG = scale_OG.bfloat16()
    divisor_OG = torch.where(scale_OG == 0, 1.0, scale_OG.float())
    value_OGK = (weight_OGK / divisor_OG[..., None]).round().clamp(-zero, zero - 1)
    words = (value_OGK.shape[1], group_len // WORD, WORD)
    stored_PCGSJ = (value_OGK + zero).to(torch.uint8).view(-1, COLUMNS, *words)
    line_PGSCJ = stored_PCGSJ.permute(0, 2, 3, 1, 4)
    if bits == BITS["int4"]:
        line_PGSCJ = line_PGSCJ[:, :, ::2] | line_PGSCJ[:, :, 1::2] << 4
    scale_PGC = scale_OG.view(-1, COLUMNS, scale_OG.shape[1]).transpose(1, 2).contiguous()
    return torch.cat([scale_PGC.view(torch.int8), line_PGSCJ.flatten(2).view(torch.int8)], dim=2)


def _steps(weight_OGK: Tensor) -> Tensor:
    """The number (O, G) of which all weights of a group are multiples from -8 to 7; 0 if there is none.

    Weights and their largest may be rounded to bf16, so multiples are whole up to `OFF_STEP`; the number is
    that of least squares.
    """
    largest_OG = weight_OGK.abs().amax(dim=-1)
    step_OG = torch.zeros_like(largest_OG)
    for most in range(MOST_STEPS, 0, -1):
        inverse_OG = most / largest_OG
        # nearly all other groups have a number among their first ones that is no multiple
        _, maybe_OG = _multiples(weight_OGK[..., :FEW], inverse_OG)
        maybe_OG &= largest_OG > NO_SIZE
        weight_RK = weight_OGK[maybe_OG]
        whole_RK, fits_R = _multiples(weight_RK, inverse_OG[maybe_OG])
        fitted_R = (whole_RK * weight_RK).sum(dim=-1) / whole_RK.square().sum(dim=-1)
        step_OG[maybe_OG] = torch.where(fits_R, fitted_R, step_OG[maybe_OG])
    return step_OG


def _multiples(weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest whole multiples (..., K) of steps (...), and whether all weights of a group are such.

    Args:
        inverse: (...), of the steps.
    """
    multiple = weight * inverse[..., None]
    whole = multiple.round()
    is_near = multiple.sub_(whole).abs_() <= OFF_STEP * whole.abs()
    return whole, is_near.all(dim=-1) & (whole.amax(dim=-1) < MOST_STEPS)


def unpack_quantised(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Values and scales of a packed weight: (O, G, K) int8 and (O, G) fp32, both with their padding."""
    panels, groups, num_bytes = packed.shape
    scale_PGC = packed[..., :SCALE_BYTES].contiguous().view(torch.bfloat16).float()
    stored = packed[..., SCALE_BYTES:].contiguous().view(torch.uint8)
    line_PGSCJ = stored.view(panels, groups, -1, COLUMNS, WORD)
    bits = 4 if num_bytes == group_bytes(4) else 8
    if bits == BITS["int4"]:
        line_PGSCJ = torch.stack([line_PGSCJ & 15, line_PGSCJ >> 4], dim=3).flatten(2, 3)
    value_PCGSJ = line_PGSCJ.permute(0, 3, 1, 2, 4).to(torch.int16) - (1 << (bits - 1))
    value_OGK = value_PCGSJ.reshape(panels * COLUMNS, groups, GROUP[bits]).to(torch.int8)
    return value_OGK, scale_PGC.transpose(1, 2).reshape(panels * COLUMNS, groups)


def group_bytes(bits: int) -> int:
    """Bytes of a panel's group."""
    return SCALE_BYTES + COLUMNS * GROUP[bits] * bits // 8


def quantise_rows(x_RI: Tensor, group_len: int) -> tuple[Tensor, Tensor]:
    """Round the rows of x, group by group.

    Args:
        x_RI: (rows, in_features), finite, bfloat16 or float32.
        group_len: Numbers of a group, K.

    Returns:
        Values (R, G, K), whole numbers in fp32 from -127 to 127, and scales (R, G) in fp32.
    """
    padded_RI = functional.pad(x_RI.float(), (0, -x_RI.shape[1] % group_len))
    x_RGK = padded_RI.view(len(x_RI), -1, group_len)
    largest_RG = x_RGK.abs().amax(dim=-1)
    # a tensor, because torch divides a number by multiplying with the reciprocal
    inverse_RG = torch.where(largest_RG > NO_SIZE, torch.tensor(LARGEST_ROUNDED) / largest_RG, 0.0)
    return (x_RGK * inverse_RG[..., None]).round(), largest_RG / LARGEST_ROUNDED


def product_reference(x: Tensor, packed: Tensor, out_features: int) -> Tensor:
    """The specification of a product with a quantised weight, before bias and rounding.

    Args:
        x: (..., in_features), finite, bfloat16 or float32.
        packed: From `quantise_weight`.

    Returns:
        (..., out_features) in fp32, to the bit what the operators compute.
    """
    value_OGK, scale_OG = (part[:out_features] for part in unpack_quantised(packed))
    x_RGK, x_scale_RG = quantise_rows(x.reshape(-1, x.shape[-1]), value_OGK.shape[2])
    sum_RO = torch.zeros(len(x_RGK), out_features)
    for group in range(value_OGK.shape[1]):
        # whole numbers below 2**24, so exact in fp32 in any order
        exact_RO = x_RGK[:, group] @ value_OGK[:, group].float().T
        sum_RO = sum_RO + exact_RO * (scale_OG[:, group] * x_scale_RG[:, group, None])
    return sum_RO.view(*x.shape[:-1], out_features)
