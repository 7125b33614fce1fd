"""Judge the depth predictor on text that it has not seen, along trees that were drafted there.

Shapes: here M = depths 0 to D.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from yggdrasil.offline.depth_training import HeldOut, accepted_lengths, other_folds, reached
from yggdrasil.policy.acceptance import TreeRecord
from yggdrasil.policy.latency import LatencyModel
from yggdrasil.policy.stopping import last_gain

__all__ = ["calibration_error", "decision_quality", "evaluate", "scores_by_depth"]

BINS = 10
CONTEXT_LEN = 64  # context length for the cost of decisions

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def evaluate(
    found: HeldOut,
    latency: LatencyModel,
    verify_widths: Sequence[int],
    *,
    decision_ms: float = 0.0,
    may_stop: bool = False,
) -> dict[str, Any]:
    """Held-out figures at one temperature: scores by depth, and the cost of the decisions.

    Args:
        may_stop: Also evaluate growth that stops; only if the host need not wait for the draft.

    Returns:
        "texts", "positions". "depths": see `scores_by_depth`. "decisions": see `decision_quality`.
    """
    return {
        "texts": len(set(found.trace.text_N.tolist())),
        "positions": len(found.fold_N),
        "depths": scores_by_depth(accepted_lengths(found.trace.deep), found.survival_ND, found.constant_ND),
        "decisions": decision_quality(found, latency, verify_widths, decision_ms, may_stop),
    }


def scores_by_depth(
    length_N: Indices, survival_ND: npt.NDArray[np.floating[Any]], constant_ND: Floats
) -> list[dict[str, Any]]:
    """Scores of predictions P(accepted >= d), one entry for every depth.

    Returns:
        "depth"; "share" that was accepted; "rarer": positions with the rarer outcome; Brier score of
        predictor and constant; "skill", 1 - their ratio; "auc" (None if there was only one outcome; the
        constant's is 0.5); "ece", the expected calibration error.
    """
    from sklearn.metrics import roc_auc_score

    rows = []
    for head, label_N in enumerate(reached(length_N, survival_ND.shape[1]).T):
        predicted_N = survival_ND[:, head]
        rarer = min(int(label_N.sum()), int((~label_N).sum()))
        brier = float(np.mean((label_N - predicted_N) ** 2))
        brier_constant = float(np.mean((label_N - constant_ND[:, head]) ** 2))
        rows.append(
            {
                "depth": head + 1,
                "share": float(label_N.mean()),
                "rarer": rarer,
                "brier": brier,
                "brier_constant": brier_constant,
                "skill": 1 - brier / brier_constant if brier_constant else 0.0,
                "auc": float(roc_auc_score(label_N, predicted_N)) if rarer else None,
                "ece": calibration_error(label_N, predicted_N),
            }
        )
    return rows


def calibration_error(label_N: Flags, predicted_N: npt.NDArray[np.floating[Any]]) -> float:
    """Expected calibration error over ten equal bins: mean distance of predicted and actual shares."""
    bin_N = np.minimum((predicted_N * BINS).astype(int), BINS - 1)
    return float(
        sum(
            abs(float(label_N[bin_N == b].mean()) - float(predicted_N[bin_N == b].mean()))
            * float((bin_N == b).mean())
            for b in set(bin_N.tolist())
        )
    )


def decision_quality(
    found: HeldOut,
    latency: LatencyModel,
    verify_widths: Sequence[int],
    decision_ms: float = 0.0,
    may_stop: bool = False,
) -> dict[str, Any]:
    """Milliseconds per token on held-out texts by depth rule; depth 0 is plain decoding.

    The rules: a fixed depth, a predicted one, growth that stops, and an oracle that knows how far every
    tree will be accepted. Every tree is pruned to the K of its best ratio, as in a step. The best fixed
    depth of a fold and its rate come from the other folds. Only a prediction costs `decision_ms`.
    """
    max_depth = found.survival_ND.shape[1]
    rules: list[str] = ["fixed", "predicted", *(["stopping"] if may_stop else [])]
    spent_ms = dict.fromkeys([*rules, "oracle"], 0.0)
    tokens = dict.fromkeys([*rules, "oracle"], 0.0)
    fixed_depths = []
    predicted_depths = []
    stopped_depths = []
    emitted_NM, cost_NM = _outcomes(found.trace.deep, latency, verify_widths, max_depth)
    for fold in range(int(found.fold_N.max()) + 1):
        others = other_folds(found.fold_N, fold)
        test = np.flatnonzero(found.fold_N == fold)
        mean_M = emitted_NM[others].mean(axis=0)
        cost_M = cost_NM[others].mean(axis=0)
        fixed = int((mean_M / cost_M).argmax())
        growth_NM = np.concatenate(
            [np.ones((len(test), 1)), 1 + found.trust * (found.growth_ND[test] - 1)], axis=1
        )
        expected_NM = 1.0 + (mean_M - 1.0) * growth_NM
        rate = mean_M[fixed] / cost_M[fixed]
        chosen_N = (expected_NM - rate * cost_M).argmax(axis=1)
        oracle_N = _oracle(emitted_NM[test], cost_NM[test])
        chosen = {"fixed": np.full(len(test), fixed), "predicted": chosen_N, "oracle": oracle_N}
        if may_stop:
            chosen["stopping"] = (
                _stopped(found.trace.deep, test, latency, verify_widths[-1], rate)
                if fixed
                else np.zeros(len(test), dtype=np.int64)
            )
            stopped_depths.append(chosen["stopping"])
        for name, depth_N in chosen.items():
            spent_ms[name] += float(cost_NM[test, depth_N].sum()) + (
                decision_ms * len(test) if name == "predicted" else 0.0
            )
            tokens[name] += float(emitted_NM[test, depth_N].sum())
        fixed_depths.append(fixed)
        predicted_depths.append(chosen_N)
    ms = {name: spent_ms[name] / tokens[name] for name in spent_ms}
    return {
        "trust": found.trust,
        "fixed_depths": fixed_depths,
        "mean_predicted_depth": float(np.concatenate(predicted_depths).mean()),
        "mean_stopped_depth": float(np.concatenate(stopped_depths).mean()) if may_stop else None,
        "ms_per_token": ms,
        "regret_ms_fixed": ms["fixed"] - ms["oracle"],
        "regret_ms_predicted": ms["predicted"] - ms["oracle"],
        "best": min(rules, key=ms.__getitem__),
    }


def _stopped(
    records: Sequence[TreeRecord], test: Indices, latency: LatencyModel, most: int, rate: float
) -> Indices:
    """(N,) depth to which `StoppingShape` would grow each tree.

    Args:
        most: Largest number of nodes that can be verified.
        rate: Tokens per millisecond.
    """
    width = records[0].width
    min_gain = rate * (latency.draft.at(width, CONTEXT_LEN) + latency.growth_host_ms)
    min_gains = [rate * ms for ms in latency.verify.marginal_ms(most, CONTEXT_LEN)]
    log_probs = np.array([records[position].log_probs for position in test])
    max_depth = (log_probs.shape[1] - 1) // width
    depth_N = np.full(len(test), max_depth)
    for depth in range(max_depth - 1, 0, -1):
        depth_N[last_gain(log_probs[:, : 1 + width * depth], width, min_gains) < min_gain] = depth
    return depth_N


def _outcomes(
    records: Sequence[TreeRecord], latency: LatencyModel, verify_widths: Sequence[int], max_depth: int
) -> tuple[Floats, Floats]:
    """Emitted tokens and milliseconds by position and depth, (N, 1 + D) each; K as in `FixedShape`."""
    width = records[0].width
    each = np.arange(len(records))
    emitted = [np.ones(len(records))]
    costs = [np.full(len(records), latency.plain_ms(CONTEXT_LEN))]
    for depth in range(1, max_depth + 1):
        num_nodes = 1 + width * depth
        menu = np.array(sorted({min(k, num_nodes) for k in verify_widths}))
        cost_K = np.array([latency.step_ms(width, depth, k, CONTEXT_LEN) for k in menu.tolist()])
        emitted_NK, expected_NK = (sums[:, menu - 1] for sums in _by_k(records, num_nodes))
        best_N = (expected_NK / cost_K).argmax(axis=1)
        emitted.append(emitted_NK[each, best_N])
        costs.append(cost_K[best_N])
    return np.stack(emitted, axis=1), np.stack(costs, axis=1)


def _by_k(records: Sequence[TreeRecord], num_nodes: int) -> tuple[Floats, Floats]:
    """(N, num_nodes) emitted and expected tokens when a tree's first nodes are pruned to the k best."""
    log_probs = np.array([record.log_probs[:num_nodes] for record in records])
    accepted = np.array([record.accepted[:num_nodes] for record in records], dtype=float)
    order = np.argsort(-log_probs, axis=1, kind="stable")
    emitted, expected = (
        np.take_along_axis(values, order, axis=1).cumsum(axis=1) for values in (accepted, np.exp(log_probs))
    )
    return emitted, expected


def _oracle(emitted_NM: Floats, cost_NM: Floats) -> Indices:
    """(N,) choices with the smallest ratio of total milliseconds to total tokens (Dinkelbach)."""
    best = np.inf
    each = np.arange(len(emitted_NM))
    chosen_N: Indices = (emitted_NM / cost_NM).argmax(axis=1)
    while (ms := cost_NM[each, chosen_N].sum() / emitted_NM[each, chosen_N].sum()) < best - 1e-12:
        best = ms
        chosen_N = (emitted_NM - cost_NM / ms).argmax(axis=1)
    return chosen_N
