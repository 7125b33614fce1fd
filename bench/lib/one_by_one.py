"""Calibration traces collected one text and one tree at a time: the specification of
yggdrasil/offline/traces.py, which does it in batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.engine import Engine
from yggdrasil.layout import READ_BEST
from yggdrasil.models.packing import Chunk, pack_chains_
from yggdrasil.models.protocol import TokenModel
from yggdrasil.offline.budget import EVERY, CalibrationSize
from yggdrasil.offline.traces import Traces
from yggdrasil.policy.acceptance import TreeRecord, fit_platt
from yggdrasil.policy.depth import Array, inputs_of
from yggdrasil.policy.uncalibrated import UNCALIBRATED, uncalibrated_policy
from yggdrasil.state import DecodeState, Row, Shape
from yggdrasil.step.choice import VERIFY_ALL, Calibration, Choice
from yggdrasil.step.coupling import coupled, noise_of, read_of
from yggdrasil.step.growth import draft_rows
from yggdrasil.step.platt import PlattScale

__all__ = ["collect_one_by_one"]


def collect_one_by_one(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    size: CalibrationSize,
    writing: Shape,
) -> Traces:
    """What `write_texts` and `drafted_traces` give for one temperature.

    Args:
        engine: The pair.
        prompts: Token lists of at least two tokens.
        temperature: Of the target.
        size: How much.
        writing: Shape with which the text is written: it changes how long that takes and nothing else.
    """
    samplings = [SamplingConfig(temperature=temperature, seed=seed) for seed in range(len(prompts))]
    texts = [
        _write(engine, prompt, sampling, size.num_written, writing)
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    edges = [
        _edges(engine, text, len(prompt), sampling)
        for text, prompt, sampling in zip(texts, prompts, samplings, strict=True)
    ]
    platt = fit_platt(*map(np.concatenate, zip(*edges, strict=True)))
    inputs: list[Array] = []
    deep: list[TreeRecord] = []
    others: list[TreeRecord] = []
    text_N: list[int] = []
    for index, (text, prompt, sampling) in enumerate(zip(texts, prompts, samplings, strict=True)):
        ends = size.root_ends(index, len(prompt))
        inputs.append(inputs_of(_outputs(engine.target, text)[1], temperature)[[end - 2 for end in ends]])
        engine.draft.cache.rollback_(0)
        for end in ends:
            deep.append(
                _record(engine, text, end, Shape(size.reference_width, size.max_depth), platt, sampling)
            )
            if len(deep) % EVERY == 1:
                others += [
                    _record(engine, text, end, Shape(width, size.max_depth), platt, sampling)
                    for width in size.widths
                    if width != size.reference_width
                ]
        text_N += [index] * len(ends)
    return Traces(temperature, np.concatenate(inputs), np.array(text_N), tuple(deep), tuple(others), platt)


def _write(
    engine: Engine, prompt: Sequence[int], sampling: SamplingConfig, num_tokens: int, shape: Shape
) -> list[int]:
    config = GenerateConfig(max_new_tokens=num_tokens, sampling=sampling, ignore_eos=True)
    return [
        *prompt,
        *(
            token
            for result in engine.generate(prompt, uncalibrated_policy(shape), config)
            for token in result.tokens
        ),
    ]


def _edges(
    engine: Engine, text: Sequence[int], start: int, sampling: SamplingConfig
) -> tuple[Array, npt.NDArray[np.bool_]]:
    draft_model = engine.draft
    outputs = _outputs(draft_model, text, read_of(sampling))
    tokens_MC, log_probs_MC = (output[start - 1 : -1] for output in outputs)
    count = draft_model.num_candidates
    if sampling.temperature > 0:
        positions = range(start, len(text))
        noise_MC = noise_of(sampling, positions, engine.target.vocab, "cpu").gather(1, tokens_MC)
        tokens_MC, log_probs_MC = coupled(tokens_MC, log_probs_MC, noise_MC, sampling, count)
    is_next_MC = tokens_MC[:, :count] == torch.tensor(text[start:])[:, None]
    return log_probs_MC[:, :count].numpy(), is_next_MC.numpy()


def _outputs(
    model: TokenModel, text: Sequence[int], read: int = READ_BEST
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both outputs of a model for every token, (L, ...) each."""
    model.cache.rollback_(0)
    first: list[torch.Tensor] = []
    second: list[torch.Tensor] = []
    for start in range(0, len(text), model.prefill_chunk):
        chunk = text[start : start + model.prefill_chunk]
        meta_NM = model.meta(len(chunk))
        pack_chains_(meta_NM, [Chunk(0, chunk, start, read=read)])
        for outputs, output in zip((first, second), model.forward(meta_NM), strict=True):
            outputs.append(output[: len(chunk)].clone())
        model.cache.commit_(range(len(chunk)))
    model.cache.rollback_(0)
    return torch.cat(first), torch.cat(second)


def _record(
    engine: Engine, text: Sequence[int], end: int, shape: Shape, platt: PlattScale, sampling: SamplingConfig
) -> TreeRecord:
    state = DecodeState(list(text[:end]), sampling)
    cache = engine.draft.cache
    cache.rollback_(min(cache.len, end - 1))
    row = Row(0, state, draft_len=cache.len)
    choice = Choice((shape,), (Calibration(platt, UNCALIBRATED.calibration.knots),), VERIFY_ALL)
    [drafted] = draft_rows(engine.draft, [row], choice, vocab=engine.target.vocab)
    cache.kept_(row.draft_len)
    tree = drafted.tree
    follows = torch.tensor(
        [text[end + depth] if end + depth < len(text) else -1 for depth in tree.depth_N.tolist()]
    )
    path = set(tree.walk(follows))
    return TreeRecord(
        shape.width, tuple(tree.log_prob_N.tolist()), tuple(node in path for node in range(len(tree)))
    )
