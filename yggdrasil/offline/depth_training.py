"""Train the depth predictor on traces, and predict text that it has not seen.

Its labels come from one pass along the texts (offline/forced.py).

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

__all__ = ["FOLDS", "HeldOut", "accepted_lengths", "fit_predictor", "held_out", "other_folds", "reached"]

# What a few hundred passages of a few dozen texts allow (bench/LOG.md)
HIDDEN = 64
STEPS = 400
BATCH = 256
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 2.0
INPUT_NOISE = 1.0  # in standard deviations of each input
MOST_DEVIATIONS = 8.0  # of a root's embedding, in standard deviations
ROWS_AT_ONCE = 8192  # tokens whose embeddings are multiplied together

FOLDS = 4
SLOPES = np.linspace(0.0, 1.5, 31)

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


def reached(length_N: Indices, max_depth: int) -> Flags:
    """(N, D) whether at least d draft tokens were accepted."""
    return length_N[:, None] >= np.arange(1, max_depth + 1)


def fit_predictor(
    traces: Sequence[Traces],
    max_depth: int,
    embedding_VE: Tensor,
    *,
    slopes: Mapping[float, Floats] | None = None,
    trust: Mapping[float, float] | None = None,
    without: Collection[int] = (),
    only_tokens: Tensor | None = None,
) -> DepthPredictor:
    """Fit encoder and heads.

    Training begins at the base rates: the heads' weights are zero. Noise on the inputs and a large weight
    decay keep the network from learning its few texts by heart.

    Args:
        traces: Traces of the same texts, one per temperature.
        max_depth: D, the number of heads.
        embedding_VE: The draft's input embedding, (V, its E): what the predictor knows of a root.
        slopes: `HeldOut.slope_D` by temperature; 1 by default.
        trust: `HeldOut.trust` by temperature; 1 by default.
        without: Texts to leave out.
        only_tokens: Roots that the predictor will see; all tokens by default.

    Source: Yggdrasil section 4.2, "Draft Depth Prediction".
    """
    kept = [~np.isin(trace.forced.text_N, list(without)) for trace in traces]
    hidden = [trace.forced.hidden_NE[keep] for trace, keep in zip(traces, kept, strict=True)]
    roots = [trace.forced.root_N[keep] for trace, keep in zip(traces, kept, strict=True)]
    labels = [
        reached(trace.forced.length_N[keep], max_depth) for trace, keep in zip(traces, kept, strict=True)
    ]
    bases = [_log_odds(reached_MD) for reached_MD in labels]
    temperatures = [trace.temperature for trace in traces]
    tokens = torch.arange(len(embedding_VE)) if only_tokens is None else only_tokens
    predictor = _trained(temperatures, hidden, roots, embedding_VE, labels, bases, tokens)
    slopes = slopes or {}
    trust = trust or {}
    heads = {
        trace.temperature: _finished(
            predictor,
            hidden_ME,
            root_M,
            trace.temperature,
            slopes.get(trace.temperature, np.ones(max_depth)),
            trust.get(trace.temperature, 1.0),
        )
        for trace, hidden_ME, root_M in zip(traces, hidden, roots, strict=True)
    }
    return replace(predictor, heads=heads)


def _log_odds(reached_MD: Flags) -> Array:
    """(D,) of the shares; finite where there was only one outcome."""
    share_D = (reached_MD.sum(axis=0) + 0.5) / (len(reached_MD) + 1)
    log_odds: Array = np.log(share_D / (1 - share_D)).astype(np.float32)
    return log_odds


def _finished(
    predictor: DepthPredictor,
    hidden_ME: Array,
    root_M: Indices,
    temperature: float,
    slope_D: Floats,
    trust: float,
) -> Heads:
    """The heads of a temperature with scaled deviations, and their means on the training text."""
    heads = predictor.heads[temperature]
    slope = slope_D.astype(np.float32)
    scaled = replace(heads, weight_HD=heads.weight_HD * slope, bias_D=heads.bias_D * slope, trust=trust)
    survival_MD = replace(predictor, heads={temperature: scaled}).survivals(hidden_ME, root_M, temperature)
    return replace(scaled, mean_D=survival_MD.mean(axis=0))


@dataclass(frozen=True)
class _Scaling:
    """Mean and inverse standard deviation of every input; 0 for one that never changes."""

    mean_E: Tensor
    scale_E: Tensor

    @classmethod
    def of(cls, inputs_ME: Tensor) -> _Scaling:
        std_E = inputs_ME.std(dim=0, correction=0)
        scale_E = torch.where(std_E == 0, 0.0, 1 / std_E.clamp(min=1e-6))
        return cls(inputs_ME.mean(dim=0), scale_E)

    def __call__(self, inputs_ME: Tensor) -> Tensor:
        return (inputs_ME - self.mean_E) * self.scale_E


def _trained(
    temperatures: Sequence[float],
    hidden: Sequence[Array],
    roots: Sequence[Indices],
    embedding_VE: Tensor,
    labels: Sequence[Flags],
    bases: Sequence[Array],
    tokens: Tensor,
) -> DepthPredictor:
    """Encoder and heads after `STEPS` steps of AdamW over the positions of all temperatures.

    Args:
        tokens: Those that have a row in the table of roots; the other rows are 0.
    """
    hidden_ME = torch.from_numpy(np.concatenate(hidden))
    embedded_ME = embedding_VE[torch.from_numpy(np.concatenate(roots))].float()
    of_hidden = _Scaling.of(hidden_ME)
    of_embedded = _Scaling.of(embedded_ME)
    of_M = torch.cat([torch.full((len(each),), place) for place, each in enumerate(hidden)])
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        encoder, heads = _fit(
            torch.cat((of_hidden(hidden_ME), _clipped(of_embedded(embedded_ME))), dim=1),
            torch.from_numpy(np.concatenate(labels)).float(),
            torch.from_numpy(np.stack(bases)),
            of_M,
        )
    weights = {
        f"{name}.{part}": array
        for name, layer in zip(ENCODER, (encoder[0], encoder[2]), strict=True)
        for part, array in (("weight", _array(layer.weight.T)), ("bias", _array(layer.bias)))
    }
    # the scaling of hidden states becomes a part of the first layer, the roots a table of what they add
    num_hidden = hidden_ME.shape[1]
    by_input = torch.from_numpy(weights["encoder_1.weight"])
    first = _array(by_input[:num_hidden] * of_hidden.scale_E[:, None])
    mean_E = _array(of_hidden.mean_E)
    weights |= {"encoder_1.weight": first, "encoder_1.bias": weights["encoder_1.bias"] - mean_E @ first}
    table_VH = torch.zeros(len(embedding_VE), HIDDEN, dtype=torch.float16)
    for part in torch.split(tokens, ROWS_AT_ONCE):
        table_VH[part] = (_clipped(of_embedded(embedding_VE[part].float())) @ by_input[num_hidden:]).half()
    return DepthPredictor(
        weights,
        table_VH.numpy(),
        {
            temperature: Heads(_array(head.weight.T), _array(head.bias), base_D, np.ones_like(base_D))
            for temperature, head, base_D in zip(temperatures, heads, bases, strict=True)
        },
    )


def _clipped(embedded_ME: Tensor) -> Tensor:
    """Tokens that are no root of the training text may be far from all that are."""
    return embedded_ME.clamp(-MOST_DEVIATIONS, MOST_DEVIATIONS)


@one_torch_thread()
def _fit(inputs_ME: Tensor, labels_MD: Tensor, base_TD: Tensor, of_M: Tensor) -> tuple[Any, Any]:
    """The encoder and the heads of every temperature.

    Args:
        base_TD: Log-odds of the base rates, by place of the temperature.
        of_M: Place of each position's temperature.
    """
    max_depth = labels_MD.shape[1]
    first = nn.Linear(inputs_ME.shape[1], HIDDEN)
    encoder = nn.Sequential(first, nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())
    heads = nn.ModuleList(nn.Linear(HIDDEN, max_depth) for _ in base_TD)
    for parameter in heads.parameters():
        nn.init.zeros_(parameter)
    parameters = [*encoder.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    ridge_HH = 1e-6 * torch.eye(HIDDEN)
    for _ in range(STEPS):
        batch = torch.randint(len(inputs_ME), (BATCH,))
        # noise of the inputs as the first layer passes it on, which takes half of the time of drawing it
        # for every input
        spread_HH = torch.linalg.cholesky(first.weight @ first.weight.T + ridge_HH)
        noise = INPUT_NOISE * torch.randn(BATCH, HIDDEN) @ spread_HH.T
        encoded = encoder[1:](first(inputs_ME[batch]) + noise)
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
    traces: Sequence[Traces], max_depth: int, embedding_VE: Tensor, tick: Callable[[], None] = lambda: None
) -> list[HeldOut]:
    """Cross-validate: predict every drafted position with a predictor that was trained without its text.

    Deviations are scaled by the slopes of the other folds. A single text is predicted by the predictor that
    was trained on it.

    Args:
        traces: Traces of the same texts, one per temperature.
        max_depth: D, the number of heads.
        embedding_VE: See `fit_predictor`.
        tick: Called after every fold, at most `FOLDS` times.
    """
    texts = sorted(set(traces[0].text_N.tolist()))
    num_folds = min(FOLDS, len(texts))
    fold_of = {text: place % num_folds for place, text in enumerate(texts)}
    folds = [np.array([fold_of[text] for text in trace.text_N.tolist()]) for trace in traces]
    tokens = torch.from_numpy(
        np.unique(np.concatenate([roots for each in traces for roots in (each.root_N, each.forced.root_N)]))
    )
    predictors = []
    for fold in range(num_folds):
        inside = [text for text in texts if fold_of[text] == fold] if num_folds > 1 else ()
        predictors.append(
            fit_predictor(traces, max_depth, embedding_VE, without=inside, only_tokens=tokens)
        )
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
    reached_ND = reached(accepted_lengths(trace.deep), max_depth)
    base_ND = np.zeros((len(fold_N), max_depth))
    deviation_ND = np.zeros_like(base_ND)
    for fold, predictor in enumerate(predictors):
        inside = fold_N == fold
        base_ND[inside] = predictor.heads[temperature].base_D
        deviation_ND[inside] = predictor.deviations(
            trace.hidden_NE[inside], trace.root_N[inside], temperature
        )
    survival_ND = np.zeros_like(base_ND, dtype=np.float32)
    growth_ND = np.zeros_like(survival_ND)
    constant_ND = np.zeros_like(base_ND)
    of_forced = np.array([fold_of.get(text, -1) for text in trace.forced.text_N.tolist()])
    for fold, predictor in enumerate(predictors):
        inside = fold_N == fold
        others = other_folds(fold_N, fold)
        slope_D = _slopes(base_ND[others], deviation_ND[others], reached_ND[others])
        own = other_folds(of_forced, fold)
        heads = _finished(
            predictor, trace.forced.hidden_NE[own], trace.forced.root_N[own], temperature, slope_D, 1.0
        )
        scaled = replace(predictor, heads={temperature: heads})
        survival_ND[inside] = scaled.survivals(trace.hidden_NE[inside], trace.root_N[inside], temperature)
        growth_ND[inside] = survival_ND[inside].cumsum(axis=1) / heads.mean_D.cumsum()
        constant_ND[inside] = reached_ND[others].mean(axis=0)
    slope_D = _slopes(base_ND, deviation_ND, reached_ND)
    return HeldOut(trace, fold_N, survival_ND, growth_ND, constant_ND, slope_D)


def _slopes(base_ND: Floats, deviation_ND: Floats, reached_ND: Flags) -> Floats:
    """(D,) factors of deviations for the smallest log loss: Platt scaling over a fixed base."""
    sign_ND = np.where(reached_ND, -1.0, 1.0)
    loss_SD = np.stack(
        [np.logaddexp(0, sign_ND * (base_ND + slope * deviation_ND)).mean(axis=0) for slope in SLOPES]
    )
    best_D: Floats = SLOPES[loss_SD.argmin(axis=0)]
    return best_D


def other_folds(fold_N: Indices, fold: int) -> Indices:
    """Positions of the other folds; all positions if there is one fold."""
    others = np.flatnonzero(fold_N != fold)
    return others if len(others) else np.arange(len(fold_N))
