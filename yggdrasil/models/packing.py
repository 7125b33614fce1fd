"""Fill the metadata of a forward: tokens, positions and what each token sees; columns are in layout.py.

Chains are host data: one operator fills them in on the host; on CUDA it fills pinned memory, and one copy
takes it to the device. Trees are filled in on the device of their arrays: by one operator on a CPU, by a
dozen small ones on CUDA. Nothing syncs. The functions `..._reference_` specify the operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from yggdrasil.layout import INDEX, PATH, POSITION, PREFIX, READ, READ_BEST, ROW, TOKEN
from yggdrasil.staging import send_, staged_like
from yggdrasil.tree import TokenTree

__all__ = [
    "Chunk",
    "empty_meta",
    "pack_chain_",
    "pack_chains_",
    "pack_chains_reference_",
    "pack_nodes_",
    "pack_nodes_reference_",
    "pad_",
]


class Chunk(NamedTuple):
    """Consecutive tokens of one row.

    Args:
        row: Row of the page table.
        start_pos: Position of the first token.
        num_read: Number of tokens, from the end, whose outputs are read; None for all.
        read: How they are read: READ_BEST or READ_WIDE.
    """

    row: int
    tokens: Sequence[int]
    start_pos: int
    num_read: int | None = None
    read: int = READ_BEST

    @property
    def read_len(self) -> int:
        """`num_read`, or the number of tokens if it is None."""
        return len(self.tokens) if self.num_read is None else self.num_read

    def part(self, start: int, length: int) -> Chunk:
        """The chunk of `length` tokens from `start` on; the same tokens are read as in the whole."""
        tokens = self.tokens[start : start + length]
        num_unread = len(self.tokens) - self.read_len
        num_read = len(tokens) - min(max(num_unread - start, 0), len(tokens))
        return Chunk(self.row, tokens, self.start_pos + start, num_read, self.read)


def empty_meta(num_tokens: int, max_depth: int, *, device: str = "cpu") -> Tensor:
    """Metadata of N rows of padding, (N, 6 + A) int32: they store, see and return nothing."""
    meta_NM = torch.zeros(num_tokens, PATH + max_depth + 1, dtype=torch.int32, device=device)
    pad_(meta_NM, 0)
    return meta_NM


def pad_(meta_NM: Tensor, first: int) -> None:
    """Make the rows from `first` on padding. Cost: three small operators, no sync."""
    if first == len(meta_NM):
        return
    meta_NM[first:, :PATH] = 0
    meta_NM[first:, INDEX] = -1
    meta_NM[first:, PATH:] = -1


def pack_chain_(
    meta_NM: Tensor, tokens: Sequence[int], start_pos: int, *, row: int = 0, num_read: int | None = None
) -> None:
    """Fill in consecutive tokens of one row; each sees everything up to itself.

    Used for prompts, and for a draft that reads the tokens of the last step.
    """
    pack_chains_(meta_NM, [Chunk(row, tokens, start_pos, num_read)])


def pack_chains_(meta_NM: Tensor, chunks: Sequence[Chunk]) -> None:
    """Fill in chunks of several rows, at most one chunk per row; drafted chains are chunks too.

    Cost: one host call; on CUDA also one copy, and no sync.
    """
    tokens = [token for chunk in chunks for token in chunk.tokens]
    lens = [len(chunk.tokens) for chunk in chunks]
    starts = [chunk.start_pos for chunk in chunks]
    rows = [chunk.row for chunk in chunks]
    num_read = [chunk.read_len for chunk in chunks]
    reads = [chunk.read for chunk in chunks]
    host_NM = meta_NM if meta_NM.is_cpu else staged_like(meta_NM)
    torch.ops.ygg.pack_chains_(host_NM, tokens, lens, starts, rows, num_read, reads)
    if host_NM is not meta_NM:
        send_(meta_NM, host_NM)


def pack_nodes_(
    meta_NM: Tensor,
    tree: TokenTree,
    first: int,
    last: int,
    root_pos: int,
    *,
    row: int = 0,
    read: int = READ_BEST,
) -> None:
    """Fill in tree nodes `first..last-1` at provisional indices; each sees the prefix and its path.

    Args:
        root_pos: Number of committed indices, which are the prefix and come before the provisional ones.
        read: How their outputs are read: READ_BEST or READ_WIDE.
    """
    if meta_NM.is_cpu:
        token, _, depth, _, path = tree.arrays
        torch.ops.ygg.pack_nodes_(meta_NM, token, depth, path, first, last, root_pos, row, read)
    else:
        pack_nodes_reference_(meta_NM, tree, first, last, root_pos, row=row, read=read)


def pack_chains_reference_(meta_NM: Tensor, chunks: Sequence[Chunk]) -> None:
    """Specifies `ygg::pack_chains_`; metadata on the host."""
    first = 0
    for chunk in chunks:
        row, tokens, start_pos, *_ = chunk
        last = first + len(tokens)
        meta_NM[first:last, TOKEN] = torch.tensor(tokens, dtype=torch.int32)
        position_N = torch.arange(
            start_pos, start_pos + len(tokens), dtype=torch.int32, device=meta_NM.device
        )
        meta_NM[first:last, POSITION] = position_N
        meta_NM[first:last, INDEX] = position_N
        meta_NM[first:last, PREFIX] = position_N + 1
        meta_NM[first:last, ROW] = row
        meta_NM[first : last - chunk.read_len, READ] = 0
        meta_NM[last - chunk.read_len : last, READ] = chunk.read
        meta_NM[first:last, PATH:] = -1
        first = last
    pad_(meta_NM, first)


def pack_nodes_reference_(
    meta_NM: Tensor,
    tree: TokenTree,
    first: int,
    last: int,
    root_pos: int,
    *,
    row: int = 0,
    read: int = READ_BEST,
) -> None:
    """Specifies `ygg::pack_nodes_`; also used on CUDA."""
    count = last - first
    pad_(meta_NM, count)
    meta_NM[:count, TOKEN] = tree.token_N[first:last]
    meta_NM[:count, POSITION] = tree.depth_N[first:last] + root_pos
    meta_NM[:count, ROW] = row
    meta_NM[:count, INDEX] = torch.arange(
        root_pos + first, root_pos + last, dtype=torch.int32, device=meta_NM.device
    )
    meta_NM[:count, PREFIX] = root_pos
    meta_NM[:count, READ] = read
    meta_NM[:count, PATH:] = tree.path_NA[first:last]
