"""Which draft to make from the target: the candidates and the choice among them.

Shapes: L = tokens of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["DraftCandidate", "OwnDraft", "accepted_lengths", "chain_speedup"]

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class DraftCandidate:
    """A draft that can be made from the target.

    Args:
        weights: Format of its linear layers; "bf16" is that of the checkpoint.
        layers: Numbers of the target's layers that it keeps, ascending.
        agreement: Share of a text's tokens after which its likeliest token is the target's.
        cost: Bytes of its linear layers over those of the target.
        speedup: Over plain decoding, of the best chain; see `chain_speedup`.
    """

    weights: str
    layers: tuple[int, ...]
    agreement: float
    cost: float
    speedup: float


@dataclass(frozen=True)
class OwnDraft:
    """A draft that is made from the target, and what it was chosen from.

    Args:
        candidates: In the order in which they were tried; of equally quick ones the first is chosen.
        num_layers: Layers of the target.
    """

    candidates: tuple[DraftCandidate, ...]
    num_layers: int

    @property
    def chosen(self) -> DraftCandidate:
        """The candidate of the largest speedup."""
        return max(self.candidates, key=lambda each: each.speedup)

    @property
    def lines(self) -> list[str]:
        """What the draft is and why: a line for it and one for every candidate."""
        chosen = self.chosen
        dropped = sorted(set(range(self.num_layers)) - set(chosen.layers))
        without = f" (without {', '.join(map(str, dropped))})" if dropped else ""
        what = f"{chosen.weights}, {len(chosen.layers)} of {self.num_layers} layers{without}"
        return [f"draft made from the target: {what}", *map(self._line, self.candidates)]

    def _line(self, each: DraftCandidate) -> str:
        mark = "*" if each == self.chosen else " "
        agrees = f"agrees on {100 * each.agreement:.1f} % of tokens"
        reads = f"reads {each.cost:.2f} of the target's bytes"
        what = f"{mark} {each.weights:<4} {len(each.layers):>3} layers"
        return f"{what}: {agrees}, {reads}, expected speedup {each.speedup:.2f}"


def accepted_lengths(agrees: Sequence[Flags], most_depth: int) -> npt.NDArray[np.float64]:
    """(D,) the share of a text's places after which a draft agrees 1, 2, ..., D times in a row.

    Args:
        agrees: For every text (L,): whether the draft's likeliest next token is the target's.
        most_depth: D.
    """
    shares = []
    for depth in range(1, most_depth + 1):
        windows = [
            np.lib.stride_tricks.sliding_window_view(agrees_L, depth).all(axis=1)
            for agrees_L in agrees
            if len(agrees_L) >= depth
        ]
        shares.append(float(np.concatenate(windows).mean()) if windows else 0.0)
    return np.array(shares)


def chain_speedup(accepted_D: npt.NDArray[np.float64], cost: float) -> float:
    """The speedup over plain decoding of the chain of the best length; 1 if none helps.

    Args:
        accepted_D: From `accepted_lengths`.
        cost: Time of a forward of the draft over one of the target. Verifying a chain counts as one forward
            of the target.

    Source: Yggdrasil Eq. (3) for W = 1, without host time.
    """
    depth_D = np.arange(1, len(accepted_D) + 1)
    return max(1.0, float(((1 + accepted_D.cumsum()) / (1 + depth_D * cost)).max(initial=0.0)))
