"""The menu: the finite set of token counts that forwards are compiled for."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from yggdrasil.config import CompileConfig
from yggdrasil.errors import ShapeNotCompiled

__all__ = ["Menu", "draft_menu", "target_menu"]

# one token runs as two: compilers treat a dimension of one specially, and a padded row costs nothing
SMALLEST = 2
SMALLEST_DRAFT = 4  # a draft is too small for fewer to take less time
BATCH = 32  # of a draft: a token for every row of a batch


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
    """Plain decoding, every verified width, and the prefill chunk."""
    return Menu(
        tuple(
            sorted(
                {SMALLEST, *(max(width, SMALLEST) for width in config.verify_widths), config.prefill_chunk}
            )
        )
    )


def draft_menu(config: CompileConfig) -> Menu:
    """Every draft width, the head draft in the smallest of them, a batch's rows, and the prefill chunk."""
    sizes = {max(width, SMALLEST_DRAFT) for width in config.widths} | {BATCH}
    return Menu((*sorted(size for size in sizes if size < config.prefill_chunk), config.prefill_chunk))
