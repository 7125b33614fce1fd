"""The menu: the finite set of token counts that forwards are compiled for."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from yggdrasil.config import CompileConfig
from yggdrasil.errors import ShapeNotCompiled

__all__ = ["Menu", "draft_menu", "target_menu"]

# One token runs as two, because a padded row takes no time where memory is the limit.
SMALLEST = 2
# A draft is so small that fewer tokens take as long.
SMALLEST_DRAFT = 4
# A batch drafts one token for each of its rows.
DRAFT_BATCH = 32


@dataclass(frozen=True)
class Menu:
    """Compiled token counts, ascending."""

    sizes: tuple[int, ...]

    def bucket(self, num_tokens: int) -> int:
        """The smallest compiled size that holds `num_tokens`; raises ShapeNotCompiled if none does."""
        place = bisect_left(self.sizes, num_tokens)
        if place == len(self.sizes):
            raise ShapeNotCompiled(num_tokens, self.sizes)
        return self.sizes[place]


def target_menu(config: CompileConfig) -> Menu:
    """One token for plain decoding, every verified width, and the prefill chunk.

    Quantised weights have a graph of one row: with a quarter of the bytes, a second row takes time.
    """
    widths = {max(width, SMALLEST) for width in config.verify_widths}
    plain = {SMALLEST} if config.weights == "bf16" else {1, SMALLEST}
    return Menu(tuple(sorted(plain | {config.prefill_chunk} | widths)))


def draft_menu(config: CompileConfig) -> Menu:
    """Every draft width, a token for each row of a batch, and the prefill chunk.

    The head draft runs in the smallest of them.
    """
    sizes = {max(width, SMALLEST_DRAFT) for width in config.widths} | {DRAFT_BATCH}
    return Menu((*sorted(size for size in sizes if size < config.prefill_chunk), config.prefill_chunk))
