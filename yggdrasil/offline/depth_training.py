"""Train the depth predictor on traces, and evaluate it on text that it has not seen.

Training takes its labels from one pass along the texts (offline/forced.py), evaluation from drafted trees.

Shapes: here M = positions of all training texts, H = outputs of the encoder, S = slopes that are tried,
T = temperatures.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from yggdrasil.kernels.threads import one_torch_thread
from yggdrasil.offline.traces import Traces
from yggdrasil.policy.acceptance import TreeRecord
from yggdrasil.policy.depth import ENCODER, Array, DepthPredictor, Heads
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
    "scores_by_depth",
]

# What a few hundred passages of a few dozen texts allow (bench/LOG.md)
HIDDEN = 64
STEPS = 400
BATCH = 256
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 2.0
INPUT_NOISE = 1.0  # in standard deviations of each input

FOLDS = 4
SLOPES = np.linspace(0.0, 1.5, 31)
BINS = 10
CONTEXT_LEN = 64  # context length for the cost of decisions

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class HeldOut:
    """Predictions for texts by predictors that were trained on other texts (cross-validation).

    Args:
        fold_N: (N,) fold of each position.
        survival_ND: (N, D) predicted P(accepted >= d).
        growth_ND: (N, D) expected accepted length within d, as a multiple of its mean on the predictor's
            own texts.
        constant_ND: (N, D) share on the other folds: the prediction of a constant predictor.
        slope_D: (D,) the part of the heads' deviations that is correct on held-out text.
    """

    trace: Traces
    fold_N: Indices
    survival_ND: Array
    growth_ND: Array
    constant_ND: Floats
    slope_D: Floats

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


def _reached(length_N: Indices, max_depth: int) -> Flags:
    """(N, D) whether at least d draft tokens were accepted."""
    return length_N[:, None] >= np.arange(1, max_depth + 1)


def fit_predictor(
    traces: Sequence[Traces],
    max_depth: int,
    *,
    slopes: Mapping[float, Floats] | None = None,
    trust: Mapping[float, float] | None = None,
    without: Collection[int] = (),
) -> DepthPredictor:
    """Fit encoder and heads.

    Training begins at the base rates: the heads' weights are zero. Noise on the inputs and a large weight
    decay keep the network from learning its few texts by heart.

    Args:
        traces: Traces of the same texts, one per temperature.
        max_depth: D, the number of heads.
        slopes: `HeldOut.slope_D` by temperature; 1 by default.
        trust: `HeldOut.trust` by temperature; 1 by default.
        without: Texts to leave out.

    Source: Yggdrasil section 4.2, "Draft Depth Prediction".
    """
    kept = [~np.isin(trace.forced.text_N, list(without)) for trace in traces]
    hidden = [trace.forced.hidden_NE[keep] for trace, keep in zip(traces, kept, strict=True)]
    labels = [
        _reached(trace.forced.length_N[keep], max_depth) for trace, keep in zip(traces, kept, strict=True)
    ]
    bases = [_log_odds(reached_MD) for reached_MD in labels]
    predictor = _trained([trace.temperature for trace in traces], hidden, labels, bases)
    slopes = slopes or {}
    trust = trust or {}
    heads = {
        trace.temperature: _finished(
            predictor,
            hidden_ME,
            trace.temperature,
            slopes.get(trace.temperature, np.ones(max_depth)),
            trust.get(trace.temperature, 1.0),
        )
        for trace, hidden_ME in zip(traces, hidden, strict=True)
    }
    return DepthPredictor(predictor.encoder, heads)


def _log_odds(reached_MD: Flags) -> Array:
    """(D,) of the shares; finite where there was only one outcome."""
    share_D = (reached_MD.sum(axis=0) + 0.5) / (len(reached_MD) + 1)
    log_odds: Array = np.log(share_D / (1 - share_D)).astype(np.float32)
    return log_odds


def _finished(
    predictor: DepthPredictor, hidden_ME: Array, temperature: float, slope_D: Floats, trust: float
) -> Heads:
    """The heads of a temperature with scaled deviations, and their means on the training text."""
    heads = predictor.heads[temperature]
    slope = slope_D.astype(np.float32)
    scaled = replace(heads, weight_HD=heads.weight_HD * slope, bias_D=heads.bias_D * slope, trust=trust)
    survival_MD = DepthPredictor(predictor.encoder, {temperature: scaled}).survivals(hidden_ME, temperature)
    return replace(scaled, mean_D=survival_MD.mean(axis=0))


def _trained(
    temperatures: Sequence[float], hidden: Sequence[Array], labels: Sequence[Flags], bases: Sequence[Array]
) -> DepthPredictor:
    """Encoder and heads after `STEPS` steps of AdamW over the positions of all temperatures."""
    inputs_ME = np.concatenate(hidden)
    mean_E = inputs_ME.mean(axis=0)
    scale_E = 1 / np.maximum(inputs_ME.std(axis=0), 1e-6)
    scale_E[inputs_ME.std(axis=0) == 0] = 0.0  # an input that never changes teaches nothing
    of_M = torch.cat([torch.full((len(each),), place) for place, each in enumerate(hidden)])
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        encoder, heads = _fit(
            torch.from_numpy((inputs_ME - mean_E) * scale_E),
            torch.from_numpy(np.concatenate(labels)).float(),
            torch.from_numpy(np.stack(bases)),
            of_M,
        )
    weights = {
        f"{name}.{part}": array
        for name, layer in zip(ENCODER, (encoder[0], encoder[2]), strict=True)
        for part, array in (("weight", _array(layer.weight.T)), ("bias", _array(layer.bias)))
    }
    first = weights["encoder_1.weight"] * scale_E[:, None]
    weights |= {"encoder_1.weight": first, "encoder_1.bias": weights["encoder_1.bias"] - mean_E @ first}
    return DepthPredictor(
        weights,
        {
            temperature: Heads(_array(head.weight.T), _array(head.bias), base_D, np.ones_like(base_D))
            for temperature, head, base_D in zip(temperatures, heads, bases, strict=True)
        },
    )


@one_torch_thread()
def _fit(inputs_ME: Tensor, labels_MD: Tensor, base_TD: Tensor, of_M: Tensor) -> tuple[Any, Any]:
    """The encoder and the heads of every temperature.

    Args:
        base_TD: Log-odds of the base rates, by place of the temperature.
        of_M: Place of each position's temperature.
    """
    max_depth = labels_MD.shape[1]
    encoder = nn.Sequential(
        nn.Linear(inputs_ME.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU()
    )
    heads = nn.ModuleList(nn.Linear(HIDDEN, max_depth) for _ in base_TD)
    for parameter in heads.parameters():
        nn.init.zeros_(parameter)
    parameters = [*encoder.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    for _ in range(STEPS):
        batch = torch.randint(len(inputs_ME), (BATCH,))
        inputs = inputs_ME[batch]
        encoded = encoder(inputs + INPUT_NOISE * torch.randn_like(inputs))
        deviations = torch.stack([head(encoded) for head in heads])[of_M[batch], torch.arange(BATCH)]
        loss = binary_cross_entropy_with_logits(base_TD[of_M[batch]] + deviations, labels_MD[batch])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return encoder, heads


def _array(tensor: Tensor) -> Array:
    return np.ascontiguousarray(tensor.detach().numpy())


def held_out(
    traces: Sequence[Traces], max_depth: int, tick: Callable[[], None] = lambda: None
) -> list[HeldOut]:
    """Cross-validate: predict every drafted position with a predictor that was trained without its text.

    Deviations are scaled by the slopes of the other folds. A single text is predicted by the predictor that
    was trained on it.

    Args:
        traces: Traces of the same texts, one per temperature.
        max_depth: D, the number of heads.
        tick: Called after every fold, at most `FOLDS` times.
    """
    texts = sorted(set(traces[0].text_N.tolist()))
    num_folds = min(FOLDS, len(texts))
    fold_of = {text: place % num_folds for place, text in enumerate(texts)}
    folds = [np.array([fold_of[text] for text in trace.text_N.tolist()]) for trace in traces]
    predictors = []
    for fold in range(num_folds):
        inside = [text for text in texts if fold_of[text] == fold]
        predictors.append(fit_predictor(traces, max_depth, without=inside if num_folds > 1 else ()))
        tick()
    return [
        _judged(trace, fold_N, predictors, fold_of, max_depth)
        for trace, fold_N in zip(traces, folds, strict=True)
    ]


def _judged(
    trace: Traces,
    fold_N: Indices,
    predictors: Sequence[DepthPredictor],
    fold_of: Mapping[int, int],
    max_depth: int,
) -> HeldOut:
    """One temperature's held-out predictions by the predictors of all folds."""
    temperature = trace.temperature
    reached_ND = _reached(accepted_lengths(trace.deep), max_depth)
    base_ND = np.zeros((len(fold_N), max_depth))
    deviation_ND = np.zeros_like(base_ND)
    for fold, predictor in enumerate(predictors):
        inside = fold_N == fold
        base_ND[inside] = predictor.heads[temperature].base_D
        deviation_ND[inside] = predictor.deviations(trace.hidden_NE[inside], temperature)
    survival_ND = np.zeros_like(base_ND, dtype=np.float32)
    growth_ND = np.zeros_like(survival_ND)
    constant_ND = np.zeros_like(base_ND)
    of_forced = np.array([fold_of.get(text, -1) for text in trace.forced.text_N.tolist()])
    for fold, predictor in enumerate(predictors):
        inside = fold_N == fold
        others = _others(fold_N, fold)
        slope_D = _slopes(base_ND[others], deviation_ND[others], reached_ND[others])
        own_ME = trace.forced.hidden_NE[_others(of_forced, fold)]
        heads = _finished(predictor, own_ME, temperature, slope_D, 1.0)
        scaled = DepthPredictor(predictor.encoder, {temperature: heads})
        survival_ND[inside] = scaled.survivals(trace.hidden_NE[inside], temperature)
        growth_ND[inside] = survival_ND[inside].cumsum(axis=1) / heads.mean_D.cumsum()
        constant_ND[inside] = reached_ND[others].mean(axis=0)
    slope_D = _slopes(base_ND, deviation_ND, reached_ND)
    return HeldOut(trace, fold_N, survival_ND, growth_ND, constant_ND, slope_D)


def _slopes(base_ND: Floats, deviation_ND: Floats, reached_ND: Flags) -> Floats:
    """(D,) by which deviations are multiplied for the least log loss: Platt scaling over a fixed base."""
    sign_ND = np.where(reached_ND, -1.0, 1.0)
    loss_SD = np.stack(
        [np.logaddexp(0, sign_ND * (base_ND + slope * deviation_ND)).mean(axis=0) for slope in SLOPES]
    )
    best_D: Floats = SLOPES[loss_SD.argmin(axis=0)]
    return best_D


def _others(fold_N: Indices, fold: int) -> Indices:
    """Positions of the other folds; all positions if there is one fold."""
    others = np.flatnonzero(fold_N != fold)
    return others if len(others) else np.arange(len(fold_N))


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
    for head, label_N in enumerate(_reached(length_N, survival_ND.shape[1]).T):
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
