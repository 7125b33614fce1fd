"""Calibration text, and traces of it, collected once: what the target wrote, its hidden states, and how far drafted trees went along with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.engine import Engine
from yggdrasil.errors import ConfigError
from yggdrasil.models.packing import pack_chain_
from yggdrasil.models.protocol import TokenModel
from yggdrasil.policy.acceptance import TreeRecord
from yggdrasil.policy.depth import Array, inputs_of
from yggdrasil.policy.uncalibrated import uncalibrated_policy
from yggdrasil.state import DecodeState, Shape
from yggdrasil.step.draft import draft
from yggdrasil.tokenizer import Tokenizer

__all__ = ["BUNDLED_TEXT", "CALIBRATION_TEXT", "PROMPT_LEN", "Traces", "beginnings", "collect_traces", "read_texts"]

CALIBRATION_TEXT = Path(__file__).parent / "data" / "calibration.jsonl"
BUNDLED_TEXT = "stories"  # name of the data set that it is
PROMPT_LEN = 24  # tokens of a calibration text that serve as its prompt
EVERY = 8  # trees of every width stand at every so many positions, of the reference width at all


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
    """

    temperature: float
    inputs_NX: Array
    text_N: np.ndarray[tuple[int], np.dtype[np.int64]]
    deep: tuple[TreeRecord, ...]
    others: tuple[TreeRecord, ...]

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
    """Let the target write, then draft trees along the text and see which nodes it passes.

    Growth is greedy, so a deep tree holds all shallower ones and one pass over the text judges them all.

    Args:
        engine: The pair.
        prompts: One of every text, token lists of at least two tokens that the context holds with `num_tokens` and `max_depth` more.
        temperature: Of the target.
        num_tokens: Positions per prompt that get trees.
        widths: Widths to draft; the reference width is one of them.
        reference_width: Width of the trees whose accepted length is predicted.
        max_depth: Depth of every tree.
        writing: Shape with which the text is written: it changes how long that takes and nothing else.
        tick: Called after every prompt.
    """
    inputs, texts, deep, others = [], [], [], []
    for index, prompt in enumerate(prompts):
        text = _write(engine, prompt, SamplingConfig(temperature=temperature, seed=index), num_tokens + max_depth, writing)
        inputs.append(inputs_of(_hidden_states(engine.target, text), temperature)[len(prompt) - 2 : len(prompt) - 2 + num_tokens])
        engine.draft.cache.rollback_(0)
        for end in range(len(prompt), len(prompt) + num_tokens):
            deep.append(_record(engine, text, end, Shape(reference_width, max_depth)))
            if len(deep) % EVERY == 1:
                others += [_record(engine, text, end, Shape(width, max_depth)) for width in widths if width != reference_width]
        texts += [index] * num_tokens
        tick()
    return Traces(temperature, np.concatenate(inputs), np.array(texts), tuple(deep), tuple(others))


def _write(engine: Engine, prompt: Sequence[int], sampling: SamplingConfig, num_tokens: int, shape: Shape) -> list[int]:
    """The prompt and what the target writes after it; with speculation, for the text is the same."""
    config = GenerateConfig(max_new_tokens=num_tokens, sampling=sampling, ignore_eos=True)
    return [*prompt, *(token for result in engine.generate(prompt, uncalibrated_policy(shape), config) for token in result.tokens)]


def _hidden_states(target: TokenModel, text: Sequence[int]) -> torch.Tensor:
    """(L, E) the target's last hidden state at every token of a text."""
    target.cache.rollback_(0)
    chunks = []
    for start in range(0, len(text), target.prefill_chunk):
        chunk = text[start : start + target.prefill_chunk]
        meta_NM = target.meta(len(chunk))
        pack_chain_(meta_NM, chunk, start)
        chunks.append(target.forward(meta_NM)[1][: len(chunk)].clone())
        target.cache.commit_(range(len(chunk)))
    target.cache.rollback_(0)
    return torch.cat(chunks)


def _record(engine: Engine, text: Sequence[int], end: int, shape: Shape) -> TreeRecord:
    """The tree after text[:end], judged by what really follows."""
    state = DecodeState(list(text[:end]))
    engine.draft.cache.rollback_(min(engine.draft.cache.len, end - 1))
    tree = draft(engine.draft, state, shape).tree
    says = torch.tensor([text[end + depth] if end + depth < len(text) else -1 for depth in tree.depth_N.tolist()])
    path = set(tree.walk(says))
    return TreeRecord(shape.width, tuple(tree.log_prob_N.tolist()), tuple(node in path for node in range(len(tree))))
