"""Packed bf16 weights in three quarters of their bytes, and every bit of them.

The upper byte of a bf16 number is its sign and the upper seven bits of its exponent. Of the 256 values that it can have, the weights of a panel have hardly
more than sixteen: those get codes of four bits, and what has another one is written down behind. One panel (linear.py) becomes a row of bytes:

    | 16 upper bytes, by code | number of escapes | 0 .. | tile 0 | tile 1 | ... | escapes | 0 .. |
      16                        4                   44     768      768            4 each

    a tile, 16 lines of 32 weights:   512 lower bytes, then 256 bytes of two codes each
    an escape:                        place of the weight in its panel << 8 | upper byte; places ascend

A tile's lines go in fours. Sixty-four lower bytes are those of two lines as a vector interleaves them with upper ones: in every sixteen eight of the one
line, then eight of the other. A byte of codes has one of the first two lines in its lower half, and that of the same place of the other two in its upper half.

That exponents can be coded and mantissas cannot is the observation of DFloat11 (Zhang et al., "70% Size, 100% Accuracy", 2025). *Departure*: codes of one
length instead of Huffman's, for a vector looks up sixty-four of those at once, and that takes less time than the bytes they save take to arrive.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["compress_weight", "decompress_weight"]

CODES = 16  # of four bits
HEADER_BYTES = 64
LINES, LINE_WEIGHTS = 16, 32  # of a tile
TILE_WEIGHTS = LINES * LINE_WEIGHTS
LOWER_BYTES, CODE_BYTES = TILE_WEIGHTS, TILE_WEIGHTS // 2
ESCAPES_STEP = 16  # their room is a multiple of it: 64 bytes
WEIGHTS_AT_ONCE = 1 << 22  # counting and looking up take some thirty bytes a weight


def compress_weight(packed: Tensor) -> Tensor:
    """Compress what `pack_weight` packed.

    Args:
        packed: (panels, steps, 16, 2) bfloat16.

    Returns:
        (panels, bytes) uint8, the header, tiles and escapes of a panel in every row. How wide it is depends on the panel with the most escapes.

    Cost: some ten operators over every weight; a new tensor.
    """
    bytes_PW2 = packed.view(torch.uint8).reshape(len(packed), -1, 2)
    num_weights = bytes_PW2.shape[1]
    assert num_weights < 1 << 23, "a place and an upper byte are a positive int32"
    parts = [_compress(part_PW2) for part_PW2 in torch.split(bytes_PW2, max(1, WEIGHTS_AT_ONCE // max(1, num_weights)))]
    width = max(part.shape[1] for part in parts)
    return torch.cat([functional.pad(part, (0, width - part.shape[1])) for part in parts])


def _compress(bytes_PW2: Tensor) -> Tensor:
    lower_PW, upper_PW = bytes_PW2.unbind(-1)
    num_panels, place_PW = len(lower_PW), upper_PW.long()
    counts_PU = torch.zeros(num_panels, 256, dtype=torch.int32).scatter_add_(1, place_PW, torch.ones((), dtype=torch.int32).expand_as(place_PW))
    table_PC = counts_PU.sort(dim=1, descending=True, stable=True).indices[:, :CODES]
    code_PU = torch.full((num_panels, 256), CODES, dtype=torch.uint8).scatter_(1, table_PC, torch.arange(CODES, dtype=torch.uint8).expand_as(table_PC))
    code_PW = code_PU.gather(1, place_PW)
    is_escape_PW = code_PW == CODES
    counts_P = is_escape_PW.sum(1, dtype=torch.int32)
    first_TGB, second_TGB = _interleaved(code_PW.masked_fill(is_escape_PW, 0)).unbind(-2)
    tiles = torch.cat([_interleaved(lower_PW).flatten(-3), (first_TGB | second_TGB << 4).flatten(-2)], dim=-1).flatten(1)
    header = torch.cat([table_PC.byte(), counts_P[:, None].contiguous().view(torch.uint8)], dim=1)
    header = functional.pad(header, (0, HEADER_BYTES - header.shape[1]))
    return torch.cat([header, tiles, _escapes(is_escape_PW, counts_P, upper_PW).view(torch.uint8)], dim=1)


def _escapes(is_escape_PW: Tensor, counts_P: Tensor, upper_PW: Tensor) -> Tensor:
    """(panels, room) int32, zero behind the last one."""
    panel, place = is_escape_PW.nonzero(as_tuple=True)
    room = -(-int(counts_P.max()) // ESCAPES_STEP) * ESCAPES_STEP
    escapes = torch.zeros(len(counts_P), room, dtype=torch.int32)
    before_P = counts_P.cumsum(0) - counts_P
    escapes[panel, torch.arange(len(panel)) - before_P[panel]] = (place << 8 | upper_PW[panel, place]).int()
    return escapes


def _interleaved(values_PW: Tensor) -> Tensor:
    """Values of weights in the order of a tile's lower bytes: (panels, tiles, fours of lines, pairs of lines, 64)."""
    lines_PTGJHLW = values_PW.view(len(values_PW), -1, LINES // 4, 2, 2, LINE_WEIGHTS // 8, 8)
    return lines_PTGJHLW.transpose(4, 5).flatten(4)


def _in_order(interleaved_PTGJB: Tensor) -> Tensor:
    """Undo `_interleaved`: (panels, weights)."""
    return torch.unflatten(interleaved_PTGJB, 4, (LINE_WEIGHTS // 8, 2, 8)).transpose(4, 5).flatten(1)


def decompress_weight(compressed: Tensor, steps: int) -> Tensor:
    """Undo `compress_weight`: the specification of what `ygg::packed_linear` multiplies by.

    Args:
        compressed: (panels, bytes) uint8.
        steps: Of k in a panel.

    Returns:
        (panels, steps, 16, 2) bfloat16, a new tensor.
    """
    num_panels, num_tiles = len(compressed), steps // LINES
    header, tiles, escapes = compressed.tensor_split([HEADER_BYTES, HEADER_BYTES + num_tiles * (LOWER_BYTES + CODE_BYTES)], dim=1)
    table_PC, counts_P = header[:, :CODES], header[:, CODES : CODES + 4].contiguous().view(torch.int32)
    tiles_PTB = tiles.reshape(num_panels, num_tiles, LOWER_BYTES + CODE_BYTES)
    lower_PW = _in_order(tiles_PTB[..., :LOWER_BYTES].reshape(num_panels, num_tiles, LINES // 4, 2, 64))
    codes = tiles_PTB[..., LOWER_BYTES:].reshape(num_panels, num_tiles, LINES // 4, 64)
    code_PW = _in_order(torch.stack([codes & 15, codes >> 4], dim=-2))
    upper_PW = table_PC.gather(1, code_PW.long())
    escapes_PE = escapes.contiguous().view(torch.int32)
    panel, which = (torch.arange(escapes_PE.shape[1]) < counts_P).nonzero(as_tuple=True)
    found = escapes_PE[panel, which]
    upper_PW[panel, found >> 8] = (found & 255).byte()
    return torch.stack([lower_PW, upper_PW], dim=-1).view(torch.bfloat16).reshape(num_panels, steps, 16, 2)
