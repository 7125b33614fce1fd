"""Accepted lengths without drafting: one pass of the draft along a text that the target has written.

The pass gives the draft's candidates after every token of the text. So all nodes of a tree that the text
follows are known, and their siblings. In a chain there is nothing else: its accepted length is exact. A
wider tree also grows below siblings, whose children the pass does not see. They get the children of an
average node: what they take from the step's W nodes is then right on average.

Shapes: here M = nodes of a tree; (N, D, C) = candidates after the first D tokens from each of N roots.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["average_children", "forced_lengths"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

ROOTS_AT_ONCE = 2048


def average_children(log_probs_NC: Floats) -> Floats:
    """(C,) log-probabilities of the children of an average node."""
    average: Floats = np.log(np.exp(log_probs_NC).mean(axis=0))
    return average


def forced_lengths(log_probs_NDC: Floats, is_next_NDC: Flags, children_C: Floats, width: int) -> Indices:
    """(N,) draft tokens that the target accepts from a tree of D growth steps under every root.

    Args:
        log_probs_NDC: Scaled log-probabilities of the candidates after the root and the D - 1 tokens that
            follow it.
        is_next_NDC: Whether a candidate is the token that follows.
        children_C: `average_children`, for the nodes that the text does not follow.
        width: W. Of a chain only the best candidates count.

    Cost: D partial sorts of all candidates of a tree.
    """
    if width == 1:
        lengths: Indices = np.minimum.accumulate(is_next_NDC[:, :, 0], axis=1).sum(axis=1)
        return lengths
    parts = range(0, len(log_probs_NDC), ROOTS_AT_ONCE)
    return np.concatenate(
        [
            _lengths(log_probs_NDC[first:last], is_next_NDC[first:last], children_C, width)
            for first in parts
            for last in (first + ROOTS_AT_ONCE,)
        ]
    )


def _lengths(log_probs_NDC: Floats, is_next_NDC: Flags, children_C: Floats, width: int) -> Indices:
    num_roots, max_depth, num_candidates = log_probs_NDC.shape
    each = np.arange(num_roots)[:, None]
    # of every node: the path log-probabilities of its candidates, and its depth if the text follows it
    paths_NMC = np.full((num_roots, 1 + width * (max_depth - 1), num_candidates), -np.inf)
    paths_NMC[:, 0] = log_probs_NDC[:, 0]
    depth_NM = np.zeros((num_roots, 1), dtype=np.int64)
    longest = np.zeros(num_roots, dtype=np.int64)
    for step in range(max_depth):
        known = depth_NM.shape[1]
        open_NM = paths_NMC[:, :known].reshape(num_roots, -1)
        best_NW = np.argpartition(-open_NM, width - 1, axis=1)[:, :width]
        path_NW = np.take_along_axis(open_NM, best_NW, axis=1)
        parent_NW, rank_NW = np.divmod(best_NW, num_candidates)
        paths_NMC[each, parent_NW, rank_NW] = -np.inf
        above_NW = depth_NM[each, parent_NW]
        follows_NW = (above_NW >= 0) & is_next_NDC[each, above_NW, rank_NW]
        depth_NW = np.where(follows_NW, above_NW + 1, -1)
        longest = np.maximum(longest, depth_NW.max(axis=1))
        if step + 1 < max_depth:
            children_NWC = np.where(
                follows_NW[..., None], log_probs_NDC[each, np.minimum(depth_NW, max_depth - 1)], children_C
            )
            paths_NMC[:, known : known + width] = path_NW[..., None] + children_NWC
            depth_NM = np.concatenate([depth_NM, depth_NW], axis=1)
    return longest
