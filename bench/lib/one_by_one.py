"""Calibration traces collected one text and one tree at a time: the specification of
yggdrasil/offline/traces.py, which does it in batches.

Shapes: L = tokens of a text, M = tokens after a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.engine import Engine
from yggdrasil.layout import READ_BEST
from yggdrasil.models.packing import Chunk, pack_chains_
from yggdrasil.models.protocol import TokenModel
from yggdrasil.offline.budget import EVERY, CalibrationSize
from yggdrasil.offline.traces import Passage, Traces, forced_positions, text_edges
from yggdrasil.offline.written import Written
from yggdrasil.policy.acceptance import TreeRecord, fit_platt
from yggdrasil.policy.depth import Array
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
    further: Sequence[Passage],
    temperature: float,
    size: CalibrationSize,
    writing: Shape,
) -> Traces:
    """What `write_texts` and `drafted_traces` give for one temperature.

    Args:
        prompts: Token lists of at least two tokens.
        further: More prompts from the same texts, without trees.
        writing: Shape with which the text is written: it changes how long that takes and nothing else.
    """
    all_prompts = [*prompts, *(passage.tokens for passage in further)]
    sources = [*range(len(prompts)), *(passage.text for passage in further)]
    samplings = [SamplingConfig(temperature=temperature, seed=seed) for seed in range(len(all_prompts))]
    texts = [
        _written(engine, prompt, sampling, size.num_written, writing)
        for prompt, sampling in zip(all_prompts, samplings, strict=True)
    ]
    candidates = [_candidates(engine, text) for text in texts]
    edges = [text_edges(*candidates[index], texts[index]) for index in range(len(prompts))]
    platt = fit_platt(*map(np.concatenate, zip(*edges, strict=True)))
    forced = forced_positions(texts, candidates, sources, size, platt)
    hidden: list[Array] = []
    deep: list[TreeRecord] = []
    others: list[TreeRecord] = []
    root_N: list[int] = []
    text_N: list[int] = []
    for index, (text, sampling) in enumerate(zip(texts[: len(prompts)], samplings, strict=False)):
        ends = size.root_ends(index, text.prompt_len)
        hidden.append(text.hidden_before(ends).numpy())
        engine.draft.cache.rollback_(0)
        for end in ends:
            deep.append(
                _record(
                    engine, text.tokens, end, Shape(size.reference_width, size.max_depth), platt, sampling
                )
            )
            if len(deep) % EVERY == 1:
                others += [
                    _record(engine, text.tokens, end, Shape(width, size.max_depth), platt, sampling)
                    for width in size.widths
                    if width != size.reference_width
                ]
        root_N += [text.tokens[end - 1] for end in ends]
        text_N += [index] * len(ends)
    return Traces(
        temperature,
        np.concatenate(hidden),
        np.array(root_N),
        np.array(text_N),
        tuple(deep),
        tuple(others),
        forced,
        platt,
    )


def _written(
    engine: Engine, prompt: Sequence[int], sampling: SamplingConfig, num_tokens: int, shape: Shape
) -> Written:
    """A text and the target's last hidden states along it."""
    text = _write(engine, prompt, sampling, num_tokens, shape)
    hidden_LE = _outputs(engine.target, text)[1].float()
    return Written(text, len(prompt), sampling, hidden_LE[len(prompt) - 2 : -1])


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


def _candidates(engine: Engine, text: Written) -> tuple[Tensor, Tensor]:
    """The draft's candidates along a text; those of sampled text are coupled."""
    count = engine.draft.num_candidates
    tokens_LM, log_probs_LM = _outputs(engine.draft, text.tokens, read_of(text.sampling))
    if text.sampling.temperature > 0:
        positions = range(1, len(text.tokens) + 1)
        noise_LM = noise_of(text.sampling, positions, engine.target.vocab, "cpu").gather(1, tokens_LM)
        return coupled(tokens_LM, log_probs_LM, noise_LM, text.sampling, count)
    return tokens_LM[:, :count], log_probs_LM[:, :count]


def _outputs(model: TokenModel, text: Sequence[int], read: int = READ_BEST) -> tuple[Tensor, Tensor]:
    """Both outputs of a model for every token, (L, ...) each."""
    model.cache.rollback_(0)
    first: list[Tensor] = []
    second: list[Tensor] = []
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
