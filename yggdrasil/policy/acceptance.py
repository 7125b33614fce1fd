"""From the draft's probabilities to measured acceptance: first for each edge, then for each path.

Shapes: M = knots, or positions of a text; D = depths of a chain, J = entries of a table, N = cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from yggdrasil.step.choice import Calibration
from yggdrasil.step.platt import UNSCALED, PlattScale

__all__ = ["Acceptance", "AcceptanceTable", "TreeRecord", "fit_acceptance", "fit_platt"]

POOL_STEPS = 4  # entries of the pooled table for one draft token a row
MIN_SLOPE = 0.05  # for a draft whose probabilities carry no information: siblings keep their order


@dataclass(frozen=True)
class TreeRecord:
    """One drafted tree and which of its nodes were accepted.

    Args:
        log_probs: Path log-probability of every node, root included.
        accepted: Whether the target's own text passes through the node.
    """

    width: int
    log_probs: tuple[float, ...]
    accepted: tuple[bool, ...]


@dataclass(frozen=True)
class Acceptance:
    """P(node accepted) as a monotone function of its path log-probability, and the AAL of whole shapes.

    Args:
        log_probs: Knots, ascending.
        probabilities: Acceptance at the knots, not falling.
        aal: By width: aal[width][depth - 1][k - 1], the mean emitted tokens of a tree of that width and
            depth pruned to k nodes.
        by_rank: P(the target's token is the draft's r-th best), r = 1.. up to the largest width.
        platt: Scale of the draft's probabilities; path log-probabilities are sums of scaled edges.
        pooled: For batches of chains: pooled[gamma - 1][j], the mean accepted tokens of a row when each row
            drafts gamma tokens and the most likely ones of the whole batch, j / POOL_STEPS a row on
            average, are verified. Empty without chains.
    """

    log_probs: tuple[float, ...] = field(repr=False)
    probabilities: tuple[float, ...] = field(repr=False)
    aal: Mapping[int, tuple[tuple[float, ...], ...]] = field(repr=False)
    by_rank: tuple[float, ...] = ()
    platt: PlattScale = UNSCALED
    pooled: tuple[tuple[float, ...], ...] = field(default=(), repr=False)

    def values(self, log_probs: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Calibrated acceptance of nodes: linear between knots, clamped outside."""
        return self.calibration.values(log_probs)

    @cached_property
    def calibration(self) -> Calibration:
        """What a step reads of it."""
        knots = torch.tensor([self.log_probs, self.probabilities], dtype=torch.float64)
        return Calibration(self.platt, knots)

    def pooled_accepted(self, gamma: int, drafts_per_row: float) -> float:
        """Mean accepted tokens of a row when the most likely draft tokens of a large batch are verified.

        Args:
            gamma: Draft tokens of every row, from 1 to the calibrated depth.
            drafts_per_row: Mean verified draft tokens of a row, from 0 to gamma; linear between entries.
        """
        row = self.pooled[gamma - 1]
        place = min(drafts_per_row * POOL_STEPS, len(row) - 1)
        low = min(int(place), len(row) - 2)
        return row[low] + (place - low) * (row[low + 1] - row[low])

    def chains_accepted(
        self, drafts_per_row: Sequence[float]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Mean accepted tokens of a row with chains of every depth.

        Args:
            drafts_per_row: Of each of N cases: mean verified draft tokens of a row.

        Returns:
            (D, N) if the most likely draft tokens of a large batch are verified, as `pooled_accepted`; and
            (D, N) if every row verifies equally many.
        """
        drafts_N = np.asarray(drafts_per_row)
        pooled_DN = _interpolated(self._pooled_DJ, drafts_N * POOL_STEPS)
        return pooled_DN, _interpolated(self._alike_DJ, drafts_N)

    @cached_property
    def _pooled_DJ(self) -> npt.NDArray[np.float64]:
        return _rectangle(self.pooled)

    @cached_property
    def _alike_DJ(self) -> npt.NDArray[np.float64]:
        return _rectangle(self.aal[1][: len(self.pooled)]) - 1.0

    def expected_emitted(self, width: int, depth: int, verify: int) -> float:
        """AAL(W, D, K), measured on the calibration text."""
        row = self.aal[width][depth - 1]
        return row[min(verify, len(row)) - 1]

    @property
    def max_depth(self) -> int:
        return min(len(rows) for rows in self.aal.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "log_probs": list(self.log_probs),
            "probabilities": list(self.probabilities),
            "aal": {str(width): [list(row) for row in rows] for width, rows in self.aal.items()},
            "by_rank": list(self.by_rank),
            "platt": asdict(self.platt),
            "pooled": [list(row) for row in self.pooled],
        }

    @classmethod
    def from_json(cls, payload: Mapping[str, Any]) -> Acceptance:
        aal = {int(width): tuple(tuple(row) for row in rows) for width, rows in payload["aal"].items()}
        pooled = tuple(tuple(row) for row in payload["pooled"])
        return cls(
            tuple(payload["log_probs"]),
            tuple(payload["probabilities"]),
            aal,
            tuple(payload["by_rank"]),
            PlattScale(**payload["platt"]),
            pooled,
        )


@dataclass(frozen=True)
class AcceptanceTable:
    """Calibrations by sampling temperature: the higher it is, the less target and draft agree."""

    by_temperature: Mapping[float, Acceptance]

    def nearest(self, temperature: float) -> Acceptance:
        """The calibration whose temperature is closest."""
        return self.by_temperature[self.nearest_temperature(temperature)]

    def nearest_temperature(self, temperature: float) -> float:
        """The calibrated temperature that is closest."""
        return min(self.by_temperature, key=lambda known: abs(known - temperature))

    @classmethod
    def from_json(cls, payload: Mapping[str, Any]) -> AcceptanceTable:
        return cls(
            {float(key): Acceptance.from_json(value) for key, value in payload["by_temperature"].items()}
        )


def _rectangle(rows: Sequence[Sequence[float]]) -> npt.NDArray[np.float64]:
    """The rows, each continued with its last entry up to the longest one's length."""
    longest = max(map(len, rows))
    return np.array([[*row, *[row[-1]] * (longest - len(row))] for row in rows])


def _interpolated(
    rows_DJ: npt.NDArray[np.float64], places_N: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """(D, N) every row at every place, linear between entries, the last entry after its end."""
    last = rows_DJ.shape[1] - 1
    places_N = places_N.clip(max=last)
    low_N = places_N.astype(np.int64).clip(max=last - 1)
    low_DN: npt.NDArray[np.float64] = rows_DJ[:, low_N]
    high_DN: npt.NDArray[np.float64] = rows_DJ[:, low_N + 1]
    place_N: npt.NDArray[np.float64] = places_N - low_N
    return (1.0 - place_N) * low_DN + place_N * high_DN


def fit_platt(log_probs_MC: npt.NDArray[np.floating], is_next_MC: npt.NDArray[np.bool_]) -> PlattScale:
    """Fit the scale of the draft's probabilities.

    Args:
        log_probs_MC: (M, C) the draft's log-probabilities of its candidates along a text of the target.
        is_next_MC: (M, C) whether the candidate is the text's next token.

    Returns:
        The scale by logistic regression; `UNSCALED` if all or none of the candidates are next tokens.

    Source: Platt 1999.
    """
    from sklearn.linear_model import LogisticRegression

    is_next = is_next_MC.ravel()
    if is_next.all() or not is_next.any():
        return UNSCALED
    log_probs = np.clip(log_probs_MC.ravel().astype(np.float64), -50.0, -1e-7)
    log_odds = log_probs - np.log(-np.expm1(log_probs))
    fitted = LogisticRegression().fit(log_odds[:, None], is_next)
    return PlattScale(max(MIN_SLOPE, float(fitted.coef_[0, 0])), float(fitted.intercept_[0]))


def fit_acceptance(records: Sequence[TreeRecord], platt: PlattScale = UNSCALED) -> Acceptance:
    """Calibrate on drafted trees whose true continuation is known.

    The map is an isotonic regression over all nodes but roots. It corrects errors that the edges of a path
    share, and keeps the order of nodes. The AAL table needs no model: growth is greedy, so the first
    1 + W * D nodes of a deep tree are the tree of depth D, and pruning to k nodes keeps the k best values.

    Args:
        records: Trees of every width, all grown to one depth.
        platt: The scale with which they were grown.

    Source: Yggdrasil section 4.2 (surrogates of acceptance, OPT-Tree); isotonic calibration is ours.
    """
    from sklearn.isotonic import IsotonicRegression  # half a second to import: only the compiler needs it

    log_probs = np.concatenate([record.log_probs[1:] for record in records])
    accepted = np.concatenate([record.accepted[1:] for record in records]).astype(float)
    isotonic = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(log_probs, accepted)
    aal = {
        width: _aal_rows([record for record in records if record.width == width])
        for width in sorted({record.width for record in records})
    }
    pooled = _pooled([record for record in records if record.width == 1])
    return Acceptance(
        tuple(isotonic.X_thresholds_.tolist()),
        tuple(isotonic.y_thresholds_.tolist()),
        aal,
        _by_rank(records),
        platt,
        pooled,
    )


def _by_rank(records: Sequence[TreeRecord]) -> tuple[float, ...]:
    """`Acceptance.by_rank`, from the widest trees: their first growth step attaches children by rank."""
    widest = max(record.width for record in records)
    firsts = [record.accepted[1 : 1 + widest] for record in records if record.width == widest]
    return tuple(np.mean(np.array(firsts, dtype=float), axis=0).tolist())


def _pooled(chains: Sequence[TreeRecord]) -> tuple[tuple[float, ...], ...]:
    """The table `Acceptance.pooled`: all chains are taken as one large batch."""
    if not chains:
        return ()
    log_probs = np.array([chain.log_probs[1:] for chain in chains])
    accepted = np.array([chain.accepted[1:] for chain in chains], dtype=float)
    rows = []
    for gamma in range(1, log_probs.shape[1] + 1):
        order = np.argsort(-log_probs[:, :gamma], axis=None, kind="stable")
        sums = np.concatenate([[0.0], accepted[:, :gamma].ravel()[order].cumsum()]) / len(chains)
        verified_per_row = np.arange(len(sums)) / len(chains)
        entries = np.arange(POOL_STEPS * gamma + 1) / POOL_STEPS
        rows.append(tuple(np.interp(entries, verified_per_row, sums).tolist()))
    return tuple(rows)


def _aal_rows(records: Sequence[TreeRecord]) -> tuple[tuple[float, ...], ...]:
    width = records[0].width
    max_depth = (len(records[0].log_probs) - 1) // width
    rows = []
    for depth in range(1, max_depth + 1):
        num_nodes = 1 + width * depth
        emitted = np.zeros(num_nodes)
        for record in records:
            order = np.argsort(-np.asarray(record.log_probs[:num_nodes]), kind="stable")
            emitted += np.cumsum(np.asarray(record.accepted[:num_nodes], dtype=float)[order])
        rows.append(tuple((emitted / len(records)).tolist()))
    return tuple(rows)
