"""Train the depth predictor on traces, and evaluate it on text that it has not seen.

Shapes: X = inputs of the network; here M = positions of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from yggdrasil.offline.traces import Traces
from yggdrasil.policy.acceptance import TreeRecord
from yggdrasil.policy.depth import LAYERS, Array, DepthPredictor
from yggdrasil.policy.latency import LatencyModel
from yggdrasil.policy.stopping import last_gain

__all__ = [
    "FOLDS",
    "HeldOut",
    "accepted_lengths",
    "calibration_error",
    "decision_quality",
    "evaluate",
    "fit_predictor",
    "held_out",
]

HIDDEN = (64, 64)
WEIGHT_DECAY = 10.0  # a few thousand positions of a few dozen texts: less overfits the texts (bench/LOG.md)
EPOCHS = 40
PATIENCE = 6
VALIDATION_SHARE = 0.25  # share of the texts for early stopping and for calibrating the heads
FOLDS = 4
BINS = 10
CONTEXT_LEN = 64  # context length for the cost of decisions

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HeldOut:
    """Predictions for texts by predictors that were trained on other texts (cross-validation).

    Args:
        fold_N: (N,) fold of each position.
        survival_ND: (N, D) predicted P(accepted >= d).
        growth_ND: (N, D) expected accepted length within d, as a multiple of its mean on the predictor's
            own texts.
        constant_ND: (N, D) share on the other folds: the prediction of a constant predictor.
    """

    trace: Traces
    fold_N: Indices
    survival_ND: Array
    growth_ND: Array
    constant_ND: Floats

    @property
    def trust(self) -> float:
        """Slope, from 0 to 1, of actual over predicted lengths, both as deviations from the mean.

        A predictor that exaggerates makes worse decisions than none.
        """
        predicted = self.growth_ND[:, -1].astype(float) - 1.0
        lengths = accepted_lengths(self.trace.deep)
        happened = lengths / max(lengths.mean(), 1e-9) - 1.0
        return float(np.clip((predicted * happened).sum() / max((predicted**2).sum(), 1e-9), 0.0, 1.0))


def accepted_lengths(records: Sequence[TreeRecord]) -> Indices:
    """(N,) draft tokens that the target accepts from every unpruned tree."""
    return np.array([sum(record.accepted) - 1 for record in records])


def _labels(trace: Traces, max_depth: int) -> npt.NDArray[np.bool_]:
    """(N, D) whether at least d draft tokens were accepted."""
    return accepted_lengths(trace.deep)[:, None] >= np.arange(1, max_depth + 1)


def fit_predictor(
    traces: Sequence[Traces],
    max_depth: int,
    *,
    trust: Mapping[float, float] | None = None,
    without: Sequence[Indices] | None = None,
) -> DepthPredictor:
    """Fit encoder and heads with early stopping on validation texts, then calibrate every head.

    Args:
        traces: Traces of the same texts, one per temperature.
        max_depth: D, the number of heads.
        trust: `HeldOut.trust` by temperature; 1 by default.
        without: Positions to leave out, for every trace.

    Source: Yggdrasil section 4.2, "Draft Depth Prediction".
    """
    from sklearn.model_selection import GroupShuffleSplit
    from sklearn.preprocessing import StandardScaler

    kept = [np.ones(len(trace.deep), dtype=bool) for trace in traces]
    for keep, left_out in zip(kept, without or (), strict=False):
        keep[left_out] = False
    inputs_MX = np.concatenate([trace.inputs_NX[keep] for trace, keep in zip(traces, kept, strict=True)])
    labels_MD = np.concatenate(
        [_labels(trace, max_depth)[keep] for trace, keep in zip(traces, kept, strict=True)]
    )
    text_M = np.concatenate([trace.text_N[keep] for trace, keep in zip(traces, kept, strict=True)])
    train = validation = np.arange(len(text_M))
    if len(set(text_M.tolist())) > 1:
        train, validation = next(
            GroupShuffleSplit(1, test_size=VALIDATION_SHARE, random_state=0).split(inputs_MX, groups=text_M)
        )
    scaler = StandardScaler().fit(inputs_MX[train])
    weights = _fit(
        scaler.transform(inputs_MX[train]),
        labels_MD[train],
        scaler.transform(inputs_MX[validation]),
        labels_MD[validation],
    )
    scale = (1.0 / scaler.scale_).astype(np.float32)
    weights["encoder_1.bias"] = (
        weights["encoder_1.bias"] - (scaler.mean_.astype(np.float32) * scale) @ weights["encoder_1.weight"]
    )
    weights["encoder_1.weight"] = weights["encoder_1.weight"] * scale[:, None]
    predictor = _calibrated(DepthPredictor(weights, {}, {}), inputs_MX[validation], labels_MD[validation])
    means = {
        trace.temperature: predictor.survivals(trace.inputs_NX[keep]).mean(axis=0)
        for trace, keep in zip(traces, kept, strict=True)
    }
    return DepthPredictor(predictor.weights, means, trust or dict.fromkeys(means, 1.0))


def held_out(
    traces: Sequence[Traces], max_depth: int, tick: Callable[[], None] = lambda: None
) -> list[HeldOut]:
    """Cross-validate: predict every position with a predictor that was trained without its text.

    A single text is predicted by the predictor that was trained on it.

    Args:
        traces: Traces of the same texts, one per temperature.
        max_depth: D, the number of heads.
        tick: Called after every fold, at most `FOLDS` times.
    """
    from sklearn.model_selection import GroupKFold

    num_texts = len(set(traces[0].text_N.tolist()))
    folds = [np.zeros(len(trace.deep), dtype=np.int64) for trace in traces]
    if num_texts > 1:
        for trace, fold_N in zip(traces, folds, strict=True):
            for fold, (_, test) in enumerate(
                GroupKFold(min(FOLDS, num_texts)).split(trace.inputs_NX, groups=trace.text_N)
            ):
                fold_N[test] = fold
    found = [_no_predictions(trace, fold_N, max_depth) for trace, fold_N in zip(traces, folds, strict=True)]
    for fold in range(max(fold_N.max() for fold_N in folds) + 1):
        inside = [np.flatnonzero(fold_N == fold) for fold_N in folds]
        predictor = fit_predictor(traces, max_depth, without=inside if num_texts > 1 else None)
        for each, test in zip(found, inside, strict=True):
            each.survival_ND[test] = predictor.survivals(each.trace.inputs_NX[test])
            each.growth_ND[test] = (
                each.survival_ND[test].cumsum(axis=1)
                / predictor.mean_survival[each.trace.temperature].cumsum()
            )
            each.constant_ND[test] = _labels(each.trace, max_depth)[_others(each.fold_N, fold)].mean(axis=0)
        tick()
    return found


def _no_predictions(trace: Traces, fold_N: Indices, max_depth: int) -> HeldOut:
    shape = (len(fold_N), max_depth)
    return HeldOut(
        trace, fold_N, np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32), np.zeros(shape)
    )


def _others(fold_N: Indices, fold: int) -> Indices:
    """Positions of the other folds; all positions if there is one fold."""
    others = np.flatnonzero(fold_N != fold)
    return others if len(others) else np.arange(len(fold_N))


def _fit(
    train_NX: Array,
    train_ND: npt.NDArray[np.bool_],
    validation_NX: Array,
    validation_ND: npt.NDArray[np.bool_],
) -> dict[str, Array]:
    """Weights of the epoch with the lowest loss on the validation texts."""
    from sklearn.neural_network import MLPClassifier

    num_heads = train_ND.shape[1]
    # scikit-learn takes a single column for one label of two classes: two equal heads, the second is
    # dropped
    if num_heads == 1:
        train_ND = np.repeat(train_ND, 2, axis=1)
        validation_ND = np.repeat(validation_ND, 2, axis=1)
    network = MLPClassifier(HIDDEN, alpha=WEIGHT_DECAY, batch_size=min(128, len(train_NX)), random_state=0)
    best = {}
    best_loss = np.inf
    best_epoch = 0
    for epoch in range(EPOCHS):
        network.partial_fit(train_NX, train_ND.astype(int), classes=np.arange(train_ND.shape[1]))
        loss = _log_loss(validation_ND, network.predict_proba(validation_NX))
        if loss < best_loss:
            layers = zip(LAYERS, network.coefs_, network.intercepts_, strict=True)
            best = {
                f"{name}.{part}": array.astype(np.float32)
                for name, weight, bias in layers
                for part, array in (("weight", weight), ("bias", bias))
            }
            best["heads.weight"] = best["heads.weight"][:, :num_heads]
            best["heads.bias"] = best["heads.bias"][:num_heads]
            best_loss = loss
            best_epoch = epoch
        elif epoch - best_epoch >= PATIENCE:
            break
    return best


def _log_loss(labels_ND: npt.NDArray[np.bool_], probabilities_ND: Floats) -> float:
    probabilities = np.clip(np.where(labels_ND, probabilities_ND, 1 - probabilities_ND), 1e-6, 1.0)
    return float(-np.log(probabilities).mean())


def _calibrated(
    predictor: DepthPredictor, inputs_NX: Array, labels_ND: npt.NDArray[np.bool_]
) -> DepthPredictor:
    """Fold Platt scaling into every head's weights; a head with only one outcome is unchanged."""
    from sklearn.linear_model import LogisticRegression

    weights = dict(predictor.weights)
    weight = weights["heads.weight"].copy()
    bias = weights["heads.bias"].copy()
    logits_ND = predictor.logits(inputs_NX)
    for head in range(labels_ND.shape[1]):
        if 0 < labels_ND[:, head].sum() < len(labels_ND):
            platt = LogisticRegression().fit(logits_ND[:, head : head + 1], labels_ND[:, head])
            slope = max(0.0, float(platt.coef_[0, 0]))
            offset = float(platt.intercept_[0])
            weight[:, head] = weight[:, head] * slope
            bias[head] = bias[head] * slope + offset
    return DepthPredictor(weights | {"heads.weight": weight, "heads.bias": bias}, {}, {})


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
        "texts", "positions". "depths": by depth, Brier score of predictor and constant predictor, AUC (None
        if there was only one outcome; the constant's is 0.5), expected calibration error. "decisions": see
        `decision_quality`.
    """
    from sklearn.metrics import brier_score_loss, roc_auc_score

    labels_ND = _labels(found.trace, found.survival_ND.shape[1])
    rows = []
    for head, label in enumerate(labels_ND.T):
        predicted = found.survival_ND[:, head]
        seen_both = 0 < label.sum() < len(label)
        rows.append(
            {
                "depth": head + 1,
                "share": float(label.mean()),
                "brier": float(brier_score_loss(label, predicted, labels=[False, True])),
                "brier_constant": float(np.mean((label - found.constant_ND[:, head]) ** 2)),
                "auc": float(roc_auc_score(label, predicted)) if seen_both else None,
                "ece": calibration_error(label, predicted),
            }
        )
    texts = len(set(found.trace.text_N.tolist()))
    return {
        "texts": texts,
        "positions": len(labels_ND),
        "depths": rows,
        "decisions": decision_quality(found, latency, verify_widths, decision_ms, may_stop),
    }


def calibration_error(label_N: npt.NDArray[np.bool_], predicted_N: npt.NDArray[np.floating[Any]]) -> float:
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
        others = _others(found.fold_N, fold)
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
