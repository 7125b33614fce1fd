"""Lossless compression of packed bf16 weights to three quarters of their bytes.

The upper byte of a bf16 number is its sign and the upper seven bits of its exponent. Of its 256 values, the
weights of a panel have hardly more than sixteen. The sixteen most frequent ones get codes of four bits; a
weight with another value is listed as an escape. One panel (linear.py) becomes a row of bytes:

    | 16 upper bytes, by code | number of escapes | 0 .. | tile 0 | tile 1 | ... | escapes | 0 .. |
      16                        4                   44     768      768            4 each

    a tile, 16 lines of 32 weights:   512 lower bytes, then 256 bytes of two codes each
    an escape:                        place of the weight in its panel << 8 | upper byte; places ascend

The lines of a tile form groups of four. 64 lower bytes are those of two lines, in the order in which a
vector instruction interleaves them with upper bytes: eight of the one line, then eight of the other, four
times. A byte of codes holds the code of a weight of the first two lines in its lower half, and the code at
the same place of the other two lines in its upper half.

DFloat11 (Zhang et al., "70% Size, 100% Accuracy", 2025) observed that exponents can be coded and mantissas
cannot. *Departure*: codes of one length instead of Huffman codes. A vector instruction looks up 64 of them
at once, in less time than the saved bytes take to arrive.

Shapes: P = panels, T = tiles, G = groups of four lines, J = pairs of lines, H = the two lines of a pair,
L = eights of weights. Here W = weights of a panel, B = bytes, C = codes, E = escapes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["compress_weight", "decompress_weight"]

CODES = 16  # codes of four bits
HEADER_BYTES = 64
# sizes of a tile
LINES = 16
LINE_WEIGHTS = 32
TILE_WEIGHTS = LINES * LINE_WEIGHTS
LOWER_BYTES = TILE_WEIGHTS
CODE_BYTES = TILE_WEIGHTS // 2
ESCAPES_STEP = 16  # the room for escapes is a multiple of this: 64 bytes

Bytes = npt.NDArray[np.uint8]


def compress_weight(packed: Tensor) -> Tensor:
    """Compress what `pack_weight` packed.

    Args:
        packed: (panels, steps, 16, 2) bfloat16.

    Returns:
        (panels, bytes) uint8, the header, tiles and escapes of a panel in every row. The panel with the
        most escapes sets the width.

    Cost: some ten passes over every weight, a panel at a time, so that each pass reads from the nearest
    caches. A new tensor.
    """
    bytes_PW2 = packed.view(torch.uint8).reshape(len(packed), -1, 2).numpy()
    num_weights = bytes_PW2.shape[1]
    assert num_weights < 1 << 23, "a place and an upper byte are a positive int32"
    panels = [_compress(bytes_W2) for bytes_W2 in bytes_PW2]
    escapes_at = HEADER_BYTES + num_weights // TILE_WEIGHTS * (LOWER_BYTES + CODE_BYTES)
    room = -(-max((len(escapes) for *_, escapes in panels), default=0) // ESCAPES_STEP) * ESCAPES_STEP
    compressed = np.zeros((len(panels), escapes_at + 4 * room), dtype=np.uint8)
    for row, (codes, tiles, escapes) in zip(compressed, panels, strict=True):
        row[:CODES] = codes
        row[CODES : CODES + 4].view(np.int32)[:] = len(escapes)
        row[HEADER_BYTES:escapes_at] = tiles
        row[escapes_at:].view(np.int32)[: len(escapes)] = escapes
    return torch.from_numpy(compressed)


def _compress(bytes_W2: Bytes) -> tuple[Bytes, Bytes, npt.NDArray[np.int32]]:
    """The upper bytes that have codes, the tiles and the escapes of one panel."""
    lower_W, upper_W = np.ascontiguousarray(bytes_W2.T)
    by_frequency = np.argsort(-np.bincount(upper_W, minlength=256), kind="stable").astype(np.uint8)
    code_of = bytearray(256)
    is_rare = bytearray(b"\1" * 256)
    for code, upper in enumerate(by_frequency[:CODES].tolist()):
        code_of[upper] = code
        is_rare[upper] = 0
    upper = upper_W.tobytes()
    code_W = np.frombuffer(upper.translate(code_of), dtype=np.uint8)  # a rare byte has code 0
    place_E = np.flatnonzero(np.frombuffer(upper.translate(is_rare), dtype=np.uint8))
    codes_TG2B = _interleaved(code_W)
    lower_TB = _interleaved(lower_W).reshape(-1, LOWER_BYTES)
    code_TB = (codes_TG2B[:, :, 0] | codes_TG2B[:, :, 1] << 4).reshape(-1, CODE_BYTES)
    escapes_E = (place_E << 8 | upper_W[place_E]).astype(np.int32)
    return by_frequency[:CODES], np.concatenate([lower_TB, code_TB], axis=1).ravel(), escapes_E


def _interleaved(value_W: Bytes) -> Bytes:
    """The values of a panel's weights in the order of its tiles' lower bytes: (T, G, J, 64)."""
    eights_TGJHL = value_W.view(np.uint64).reshape(-1, LINES // 4, 2, 2, LINE_WEIGHTS // 8)
    return np.ascontiguousarray(eights_TGJHL.swapaxes(3, 4)).view(np.uint8).reshape(-1, LINES // 4, 2, 64)


def _in_order(interleaved_PTGJB: Tensor) -> Tensor:
    """Undo `_interleaved`: (panels, weights)."""
    return torch.unflatten(interleaved_PTGJB, 4, (LINE_WEIGHTS // 8, 2, 8)).transpose(4, 5).flatten(1)


def decompress_weight(compressed: Tensor, steps: int) -> Tensor:
    """Undo `compress_weight`: the specification of the weights that `ygg::packed_linear` expands.

    Args:
        compressed: (panels, bytes) uint8.
        steps: Steps of k in a panel.

    Returns:
        (panels, steps, 16, 2) bfloat16, a new tensor.
    """
    num_panels = len(compressed)
    num_tiles = steps // LINES
    header, tiles, escapes = compressed.tensor_split(
        [HEADER_BYTES, HEADER_BYTES + num_tiles * (LOWER_BYTES + CODE_BYTES)], dim=1
    )
    table_PC = header[:, :CODES]
    counts_P = header[:, CODES : CODES + 4].contiguous().view(torch.int32)
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
