"""Make a draft from the target: its weights rounded further, fewer of its layers, or both.

Every candidate reads a calibration text after the target. What counts is how often both have the same
likeliest next token, and how many bytes a forward reads. No clock is read, so the same files give the same
draft.

Shapes: L = tokens of a text, F = hidden features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from yggdrasil.bundle import Bundle
from yggdrasil.config import AUTO, WEIGHTS, CompileConfig
from yggdrasil.errors import UnsupportedModel
from yggdrasil.kernels.linear import PackedLinear
from yggdrasil.models.layers import keep_layers_, layer_list
from yggdrasil.models.load import load_model, pack_linears_
from yggdrasil.models.proof import own_attention
from yggdrasil.offline.build import compresses
from yggdrasil.offline.progress import Progress
from yggdrasil.offline.quality import token_texts
from yggdrasil.policy.own_draft import DraftCandidate, OwnDraft, accepted_lengths, chain_speedup
from yggdrasil.store import artifacts

__all__ = ["formats_of", "layer_counts", "with_own_draft"]

TEXTS = 16
TEXT_LEN = 64  # tokens of a text
SHARES = (1.0, 0.75, 0.5, 0.25)  # of the layers
COMPRESSED = 0.75  # of the bytes of weights, see kernels/compression.py


def with_own_draft(bundle: Bundle, texts: Sequence[str], progress: Progress) -> Bundle:
    """The description of a pair whose draft is made from the target, with the best draft.

    Args:
        bundle: From `describe_pair` without a draft. Its configuration may set the draft's format or number
            of layers.
        texts: Of the calibration.

    Raises:
        UnsupportedModel: layers have to be dropped and cannot be.

    Cost: the target is loaded once more for each format; it and each candidate read a thousand tokens.
    """
    own = _compared(bundle, texts, progress)
    chosen = own.chosen
    layers = chosen.layers
    return replace(
        bundle,
        config=replace(bundle.config, draft_weights=chosen.weights, draft_layers=len(layers)),
        folder=bundle.folder.with_name(artifacts.digest(bundle.folder.name, chosen.weights, list(layers))),
        kv_draft=replace(bundle.kv_draft, num_layers=len(layers)),
        own_draft=own,
    )


def formats_of(config: CompileConfig) -> tuple[str, ...]:
    """Formats of the candidates' weights, the smallest first."""
    if config.draft_weights != AUTO:
        return (config.draft_weights,)
    if not config.can_round:
        return ("bf16",)
    most = WEIGHTS.index(config.weights)
    return tuple(weights for weights in ("int4", "int8") if WEIGHTS.index(weights) >= most)


def layer_counts(num_layers: int, config: CompileConfig, *, is_cuttable: bool) -> list[int]:
    """Numbers of layers of the candidates, the largest first.

    Args:
        is_cuttable: Whether layers can be dropped.
    """
    if config.draft_layers is not None:
        return [config.draft_layers]
    shares = SHARES if is_cuttable else SHARES[:1]
    return sorted({math.ceil(share * num_layers) for share in shares}, reverse=True)


class _Target(NamedTuple):
    """What candidates are compared with.

    Args:
        likeliest: The likeliest token after every token of each text, (L,) each.
        num_bytes: Bytes of the linear layers.
        layers: Numbers of its layers, those that change the hidden states most first.
        is_cuttable: Whether layers can be dropped.
    """

    likeliest: list[Tensor]
    num_bytes: float
    layers: list[int]
    is_cuttable: bool


@torch.no_grad()
def _compared(bundle: Bundle, texts: Sequence[str], progress: Progress) -> OwnDraft:
    config = bundle.config
    read = [token_L[:TEXT_LEN] for token_L in token_texts(bundle.models[0], texts[:TEXTS], bundle.vocab)]
    formats = formats_of(config)
    with progress.phase("read text with the target", 1):
        target = _target(bundle, read)
    num_layers = len(target.layers)
    counts = layer_counts(num_layers, config, is_cuttable=target.is_cuttable)
    if not target.is_cuttable and (counts != [num_layers] or formats == (config.weights,)):
        raise UnsupportedModel(bundle.models[0], "a draft with fewer layers, which are in no single list,")
    candidates: list[DraftCandidate] = []
    with progress.phase("compare drafts", len(formats) * len(counts)):
        for weights in formats:
            for layers, model in _cut(_loaded(bundle, weights), counts, target.layers):
                progress.advance()
                if weights != config.weights or len(layers) < num_layers:  # else it is the target
                    found = _likeliest(model, read, bundle.vocab)
                    pairs = zip(found, target.likeliest, strict=True)
                    agrees = [(one == other).numpy() for one, other in pairs]
                    cost = _read_bytes(config, model) / target.num_bytes
                    candidates.append(_candidate(weights, layers, agrees, cost, config.max_depth))
    return OwnDraft(tuple(candidates), num_layers)


def _target(bundle: Bundle, read: Sequence[Tensor]) -> _Target:
    """Read the texts with the target."""
    model = _loaded(bundle, bundle.config.weights)
    num_bytes = _read_bytes(bundle.config, model)
    with _influences(model) as influences:
        likeliest = _likeliest(model, read, bundle.vocab)
    layers = sorted(influences, key=lambda layer: (-influences[layer], layer))
    return _Target(likeliest, num_bytes, layers, layer_list(model) is not None)


def _cut(
    model: Any, counts: Sequence[int], by_influence: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], Any]]:
    """The model with fewer and fewer layers, and the numbers of those that remain."""
    layers = tuple(range(len(by_influence)))
    for count in counts:
        kept = tuple(sorted(by_influence[:count]))
        if kept != layers:
            keep_layers_(model, [layers.index(layer) for layer in kept])
            layers = kept
        yield layers, model


def _candidate(
    weights: str,
    layers: tuple[int, ...],
    agrees: Sequence[npt.NDArray[np.bool_]],
    cost: float,
    most_depth: int,
) -> DraftCandidate:
    agreement = float(np.concatenate(agrees).mean()) if agrees else 0.0
    speedup = chain_speedup(accepted_lengths(agrees, most_depth), cost)
    return DraftCandidate(weights, layers, round(agreement, 4), round(cost, 4), round(speedup, 4))


def _loaded(bundle: Bundle, weights: str) -> Any:
    """The target with its linear layers in a format."""
    model = load_model(bundle.models[0], dtype=bundle.dtype)
    if weights != "bf16":
        pack_linears_(model, weights=weights)
    return model


def _read_bytes(config: CompileConfig, model: nn.Module) -> float:
    """Bytes of the linear layers as they will be stored; a forward reads all of them."""
    packed_bytes = sum(
        module.packed.nbytes for module in model.modules() if isinstance(module, PackedLinear)
    )
    kept_bytes = sum(module.weight.nbytes for module in model.modules() if isinstance(module, nn.Linear))
    return packed_bytes + kept_bytes * (COMPRESSED if kept_bytes and compresses(config, model) else 1.0)


def _likeliest(model: Any, texts: Sequence[Tensor], vocab: int) -> list[Tensor]:
    """The likeliest token after every token of each text, (L,) each."""
    with own_attention(model):
        return [
            model(input_ids=token_L[None], use_cache=False).logits[0, :, :vocab].argmax(dim=-1)
            for token_L in texts
        ]


@contextmanager
def _influences(model: Any) -> Iterator[dict[int, float]]:
    """How much each layer changes the hidden states that it reads within the block: 1 - their cosine.

    Source: Men et al., "ShortGPT", block influence.
    """
    name = layer_list(model)
    sums: dict[int, float] = dict.fromkeys(range(model.config.num_hidden_layers), 0.0)

    def note(layer: int, before_LF: Tensor, after_LF: Tensor) -> None:
        cosine_L = functional.cosine_similarity(before_LF.float(), after_LF.float(), dim=-1)
        sums[layer] += float((1 - cosine_L).sum())

    hooks = [
        layer.register_forward_hook(
            lambda _, given, options, output, place=place: note(
                place, given[0] if given else options["hidden_states"], _first(output)
            ),
            with_kwargs=True,
        )
        for place, layer in enumerate(model.get_submodule(name) if name else ())
    ]
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()


def _first(output: Any) -> Tensor:
    """A layer's hidden states; some architectures return them in a tuple."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor
