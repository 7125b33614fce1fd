"""Calibration text, and traces of it, collected once: what the target wrote, its hidden states, and how far drafted trees went along with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.engine import Engine
from yggdrasil.errors import ConfigError
from yggdrasil.models.packing import pack_chain_
from yggdrasil.models.protocol import TokenModel
from yggdrasil.policy.acceptance import TreeRecord, fit_platt
from yggdrasil.policy.depth import Array, inputs_of
from yggdrasil.policy.uncalibrated import uncalibrated_policy
from yggdrasil.state import DecodeState, Shape
from yggdrasil.step.draft import draft
from yggdrasil.step.platt import UNSCALED, PlattScale
from yggdrasil.tokenizer import Tokenizer

__all__ = ["BUNDLED_TEXT", "CALIBRATION_TEXT", "PROMPT_LEN", "Traces", "beginnings", "collect_traces", "read_texts"]

CALIBRATION_TEXT = Path(__file__).parent / "data" / "calibration.jsonl"
BUNDLED_TEXT = "stories"  # name of the data set that it is
PROMPT_LEN = 24  # tokens of a calibration text that serve as its prompt
STEP = 2  # trees stand at every so many positions: neighbours see nearly the same text and would say nearly the same
EVERY = 4  # and at every so many of those they are of all widths, at the others of the reference width


def read_texts(path: Path) -> list[str]:
    """The texts of a calibration file.

    Raises:
        ConfigError: missing, unreadable or without text.
    """
    try:
        lines = path.read_text().splitlines()
        texts = [json.loads(line)["text"] for line in lines if line.strip()] if path.suffix == ".jsonl" else "\n".join(lines).split("\n\n")
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("calibration", str(path), 'a text file, or a .jsonl with a "text" in every line', str(error)) from None
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ConfigError("calibration", str(path), "a file with at least one text")
    return texts


def beginnings(texts: Sequence[str], tokenizer: Tokenizer, calibration: str) -> list[list[int]]:
    """The prompts of some texts: at most PROMPT_LEN tokens of each, and at least two.

    Args:
        texts: Of the calibration.
        tokenizer: Of the pair.
        calibration: Where the texts are from, empty for the bundled ones; for the error.

    Raises:
        ConfigError: no text has two tokens.
    """
    prompts = [tokenizer.encode(text)[:PROMPT_LEN] for text in texts]
    prompts = [prompt for prompt in prompts if len(prompt) > 1]
    if not prompts:
        path = calibration or str(CALIBRATION_TEXT)
        raise ConfigError("calibration", path, "a file with at least one text of two tokens", "ygg compile TARGET DRAFT --calibration FILE")
    return prompts


@dataclass(frozen=True)
class Traces:
    """Positions of target text at one temperature.

    Args:
        temperature: Of the target.
        inputs_NX: (N, E + 1) what a depth predictor sees at every position.
        text_N: (N,) which text a position belongs to: texts, not positions, are split.
        deep: N trees of the reference width, as deep as the menu goes.
        others: Trees of the other widths at some of the positions.
        platt: What the draft's probability of a child is worth; all trees were grown with it.
    """

    temperature: float
    inputs_NX: Array
    text_N: np.ndarray[tuple[int], np.dtype[np.int64]]
    deep: tuple[TreeRecord, ...]
    others: tuple[TreeRecord, ...]
    platt: PlattScale = UNSCALED

    @property
    def sampled(self) -> tuple[TreeRecord, ...]:
        """Trees of every width, as many of each, for the calibration of acceptance."""
        return (*self.deep[::EVERY], *self.others)


def collect_traces(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    num_tokens: int,
    widths: Sequence[int],
    reference_width: int,
    max_depth: int,
    writing: Shape,
    tick: Callable[[], None] = lambda: None,
) -> Traces:
    """Let the target write, ask the draft for its candidates along the text, then draft trees there and see which nodes the text passes.

    The candidates give the scale of the edges, with which the trees grow. Growth is greedy, so a deep tree holds all shallower
    ones and one pass over the text judges them all.

    Args:
        engine: The pair.
        prompts: One of every text, token lists of at least two tokens that the context holds with `num_tokens` and `max_depth` more.
        temperature: Of the target.
        num_tokens: Positions per prompt; every STEP-th gets a tree.
        widths: Widths to draft; the reference width is one of them.
        reference_width: Width of the trees whose accepted length is predicted.
        max_depth: Depth of every tree.
        writing: Shape with which the text is written: it changes how long that takes and nothing else.
        tick: Called twice for every prompt: its text is written, its trees are judged.
    """
    texts = []
    for index, prompt in enumerate(prompts):
        texts.append(_write(engine, prompt, SamplingConfig(temperature=temperature, seed=index), num_tokens + max_depth, writing))
        tick()
    edges = [_edges(engine.draft, text, len(prompt)) for text, prompt in zip(texts, prompts, strict=True)]
    platt = fit_platt(*map(np.concatenate, zip(*edges, strict=True)))
    inputs, text_N, deep, others = [], [], [], []
    for index, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        ends = range(len(prompt), len(prompt) + num_tokens, STEP)
        inputs.append(inputs_of(_outputs(engine.target, text)[1], temperature)[[end - 2 for end in ends]])
        engine.draft.cache.rollback_(0)
        for end in ends:
            deep.append(_record(engine, text, end, Shape(reference_width, max_depth), platt))
            if len(deep) % EVERY == 1:
                others += [_record(engine, text, end, Shape(width, max_depth), platt) for width in widths if width != reference_width]
        text_N += [index] * len(ends)
        tick()
    return Traces(temperature, np.concatenate(inputs), np.array(text_N), tuple(deep), tuple(others), platt)


def _write(engine: Engine, prompt: Sequence[int], sampling: SamplingConfig, num_tokens: int, shape: Shape) -> list[int]:
    """The prompt and what the target writes after it; with speculation, for the text is the same."""
    config = GenerateConfig(max_new_tokens=num_tokens, sampling=sampling, ignore_eos=True)
    return [*prompt, *(token for result in engine.generate(prompt, uncalibrated_policy(shape), config) for token in result.tokens)]


def _edges(draft_model: TokenModel, text: Sequence[int], start: int) -> tuple[Array, npt.NDArray[np.bool_]]:
    """(M, C) what the draft gives its candidates for every token from `start` on, and whether each is that token."""
    tokens_LC, log_probs_LC = _outputs(draft_model, text)
    is_next_MC = tokens_LC[start - 1 : -1] == torch.tensor(text[start:], device=tokens_LC.device)[:, None]
    return log_probs_LC[start - 1 : -1].numpy(force=True), is_next_MC.numpy(force=True)


def _outputs(model: TokenModel, text: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What a model says at each of L tokens: (L, ...) both outputs of its forwards."""
    model.cache.rollback_(0)
    first: list[torch.Tensor] = []
    second: list[torch.Tensor] = []
    for start in range(0, len(text), model.prefill_chunk):
        chunk = text[start : start + model.prefill_chunk]
        meta_NM = model.meta(len(chunk))
        pack_chain_(meta_NM, chunk, start)
        for outputs, output in zip((first, second), model.forward(meta_NM), strict=True):
            outputs.append(output[: len(chunk)].clone())  # on CUDA the next replay writes over it
        model.cache.commit_(range(len(chunk)))
    model.cache.rollback_(0)
    return torch.cat(first), torch.cat(second)


def _record(engine: Engine, text: Sequence[int], end: int, shape: Shape, platt: PlattScale) -> TreeRecord:
    """The tree after text[:end], judged by what really follows."""
    state = DecodeState(list(text[:end]))
    engine.draft.cache.rollback_(min(engine.draft.cache.len, end - 1))
    tree = draft(engine.draft, state, shape, platt).tree
    says = torch.tensor([text[end + depth] if end + depth < len(text) else -1 for depth in tree.depth_N.tolist()])
    path = set(tree.walk(says))
    return TreeRecord(shape.width, tuple(tree.log_prob_N.tolist()), tuple(node in path for node in range(len(tree))))
