"""Calibration text, and traces of it, collected once: what the target wrote, its hidden states, and how far
drafted trees went along with it.

Shapes: L = tokens of a text, X = inputs of the network.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from yggdrasil.config import SamplingConfig
from yggdrasil.errors import ConfigError, YggError
from yggdrasil.models.packing import Chunk
from yggdrasil.models.protocol import TokenGraphs
from yggdrasil.offline.budget import EVERY, CalibrationSize
from yggdrasil.policy.acceptance import TreeRecord, fit_platt
from yggdrasil.policy.depth import Array, inputs_of
from yggdrasil.state import DecodeState, Row
from yggdrasil.step.forest import Seed, grow_forest
from yggdrasil.step.platt import UNSCALED, PlattScale
from yggdrasil.step.rows import Chain, accept_rows, run_chunks
from yggdrasil.tokenizer import Tokenizer
from yggdrasil.tree import TokenTree

__all__ = [
    "BUNDLED_TEXT",
    "CALIBRATION_TEXT",
    "PROMPT_LEN",
    "Traces",
    "Written",
    "beginnings",
    "drafted_traces",
    "read_texts",
    "write_texts",
]

CALIBRATION_TEXT = Path(__file__).parent.parent / "data" / "calibration.jsonl"
BUNDLED_TEXT = "stories"  # name of the data set that it is
PROMPT_LEN = 24  # tokens of a calibration text that serve as its prompt


def read_texts(path: Path) -> list[str]:
    """The texts of a calibration file.

    Raises:
        ConfigError: missing, unreadable or without text.
    """
    try:
        lines = path.read_text().splitlines()
        texts = (
            [json.loads(line)["text"] for line in lines if line.strip()]
            if path.suffix == ".jsonl"
            else "\n".join(lines).split("\n\n")
        )
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "calibration", str(path), 'a text file, or a .jsonl with a "text" in every line', str(error)
        ) from None
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
        raise ConfigError(
            "calibration",
            path,
            "a file with at least one text of two tokens",
            "ygg compile TARGET DRAFT --calibration FILE",
        )
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
        platt: Calibration of the draft's probabilities; all trees were grown with it.
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


@dataclass(frozen=True)
class Written:
    """A text of the target.

    Args:
        tokens: The prompt and what the target wrote after it.
        prompt_len: How many of them are the prompt, at least two.
        hidden_LE: The target's last hidden states from the last but one token of the prompt to the last but
            one of the text.
    """

    tokens: Sequence[int]
    prompt_len: int
    hidden_LE: torch.Tensor

    def hidden_before(self, ends: Sequence[int]) -> torch.Tensor:
        """(N, E) what is known when a token at index `end - 1` is the root: the state of the token before
        it.
        """
        return self.hidden_LE[[end - self.prompt_len for end in ends]]


def write_texts(
    target: TokenGraphs,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    *,
    num_tokens: int,
    num_rows: int,
    tick: Callable[[int], None],
) -> dict[float, list[Written]]:
    """Let the target write after every prompt at every temperature, a token of every row in each forward.

    Args:
        target: Over pages of `num_rows` rows.
        prompts: Token lists of at least two tokens.
        temperatures: Of the sampling. The seed of a text is its place: it is the text that the engine
            writes after its prompt with this seed.
        num_tokens: Of every text, after its prompt; a text does not end before.
        num_rows: Texts at a time.
        tick: Called with the number of tokens that were run.

    Raises:
        YggError: the target's logits are not finite.
    """
    jobs = [
        (temperature, seed, prompt) for temperature in temperatures for seed, prompt in enumerate(prompts)
    ]
    written: dict[float, list[Written]] = {temperature: [] for temperature in temperatures}
    for first in range(0, len(jobs), num_rows):
        states = [
            DecodeState(list(prompt), SamplingConfig(temperature=temperature, seed=seed))
            for temperature, seed, prompt in jobs[first : first + num_rows]
        ]
        for state, text in zip(
            states,
            _write(target, [Row(*place) for place in enumerate(states)], num_tokens, tick),
            strict=True,
        ):
            written[state.sampling.temperature].append(text)
    return written


def _write(
    target: TokenGraphs, rows: Sequence[Row], num_tokens: int, tick: Callable[[int], None]
) -> list[Written]:
    prompts = [Chunk(row.row, row.state.tokens[:-1], 0, 0) for row in rows]
    last = {row: hidden_LE[-1].clone() for row, _, hidden_LE in _outputs(target, prompts, tick)}
    hidden = [[last[row.row]] for row in rows]
    for _ in range(num_tokens):
        roots = [Chunk(row.row, row.state.tokens[-1:], row.state.root_pos) for row in rows]
        outputs = [
            (logits_1V.clone(), hidden_1E[0].clone())
            for _, logits_1V, hidden_1E in _outputs(target, roots, tick)
        ]
        _append_(rows, torch.cat([logits_1V for logits_1V, _ in outputs]))
        for of_row, (_, hidden_E) in zip(hidden, outputs, strict=True):
            of_row.append(hidden_E)
    return [
        Written(row.state.tokens, row.state.prompt_len, torch.stack(of_row))
        for row, of_row in zip(rows, hidden, strict=True)
    ]


def _append_(rows: Sequence[Row], logits_BV: torch.Tensor) -> None:
    """Every row's next token, as plain decoding takes it."""
    for row, accepted in zip(
        rows, accept_rows(rows, [Chain()] * len(rows), logits_BV, range(len(rows))), strict=True
    ):
        if isinstance(accepted, YggError):
            raise accepted
        row.state.tokens.extend(accepted.tokens)


def _outputs(
    model: TokenGraphs, chunks: Sequence[Chunk], tick: Callable[[int], None]
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Row and both outputs for the tokens of every chunk, (L, ...) each; a chunk that no forward held whole
    comes in parts, one after another.

    Aliasing: on CUDA overwritten by the next replay.
    """
    for batch, outputs in run_chunks(model, chunks, model.prefill_chunk):
        lens = [len(chunk.tokens) for chunk in batch]
        for chunk, first, second in zip(
            batch, *(torch.split(output[: sum(lens)], lens) for output in outputs), strict=True
        ):
            yield chunk.row, first, second
        tick(sum(lens))


def _candidates(
    draft: TokenGraphs, texts: Sequence[Written], tick: Callable[[int], None]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The draft's candidates after every token of every text and their log-probabilities, (L, C) each.

    Those after the prompt's tokens but the last are not computed.
    """
    chunks = [
        Chunk(row, text.tokens, 0, len(text.tokens) - text.prompt_len + 1) for row, text in enumerate(texts)
    ]
    parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in texts]
    for row, tokens_LC, log_probs_LC in _outputs(draft, chunks, tick):
        parts[row].append((tokens_LC.clone(), log_probs_LC.clone()))
    return [
        (
            torch.cat([tokens_LC for tokens_LC, _ in of_row]),
            torch.cat([log_probs_LC for _, log_probs_LC in of_row]),
        )
        for of_row in parts
    ]


def drafted_traces(
    draft: TokenGraphs,
    texts: Sequence[Written],
    temperature: float,
    size: CalibrationSize,
    *,
    tick: Callable[[int], None],
) -> Traces:
    """Ask the draft for its candidates along the texts, then draft trees there and see which nodes the
    texts pass.

    The candidates give the scale of the edges, with which the trees grow. Growth is greedy, so a deep tree
    holds all shallower ones and one pass over the text judges them all.

    Args:
        draft: Over pages of a row for every text, with room for it and a tree.
        texts: Of one temperature, of the length that `size` asks for.
        temperature: Theirs.
        size: Which trees.
        tick: Called with the number of tokens that were run.
    """
    candidates = _candidates(draft, texts, tick)
    edges = [_edges(*outputs, text) for outputs, text in zip(candidates, texts, strict=True)]
    platt = fit_platt(*map(np.concatenate, zip(*edges, strict=True)))
    ends = [size.root_ends(row, text.prompt_len) for row, text in enumerate(texts)]
    records: dict[tuple[int, int, int], TreeRecord] = {}
    for seed, tree in grow_forest(draft, _seeds(texts, ends, candidates, size, platt)):
        records[seed.row, seed.root_pos + 1, seed.width] = _record(tree, seed, texts[seed.row].tokens)
        tick(len(tree) - 1 - seed.width)
    places = [(row, end) for row, of_row in enumerate(ends) for end in of_row]
    deep = tuple(records[row, end, size.reference_width] for row, end in places)
    others = tuple(
        records[row, end, width]
        for row, end in places[::EVERY]
        for width in size.widths
        if width != size.reference_width
    )
    inputs_NX = np.concatenate(
        [
            inputs_of(text.hidden_before(of_row), temperature)
            for text, of_row in zip(texts, ends, strict=True)
        ]
    )
    return Traces(temperature, inputs_NX, np.array([row for row, _ in places]), deep, others, platt)


def _seeds(
    texts: Sequence[Written],
    ends: Sequence[range],
    candidates: Sequence[tuple[torch.Tensor, torch.Tensor]],
    size: CalibrationSize,
    platt: PlattScale,
) -> list[list[Seed]]:
    """The trees of every text, the last root first: a tree overwrites the text after its root."""
    num_before = np.cumsum([0, *map(len, ends)])
    rows: list[list[Seed]] = []
    for row, (text, of_row, (tokens_LC, log_probs_LC)) in enumerate(
        zip(texts, ends, candidates, strict=True)
    ):
        rows.append([])
        for place, end in reversed(list(enumerate(of_row, int(num_before[row])))):
            widths = size.widths if place % EVERY == 0 else (size.reference_width,)
            root = slice(end - 1, end)
            rows[-1] += [
                Seed(
                    row,
                    text.tokens[end - 1],
                    end - 1,
                    width,
                    size.max_depth,
                    tokens_LC[root],
                    log_probs_LC[root],
                    platt,
                )
                for width in widths
            ]
    return rows


def _edges(
    tokens_LC: torch.Tensor, log_probs_LC: torch.Tensor, text: Written
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """(M, C) the draft's candidates for every written token, and whether each is that token."""
    start = text.prompt_len
    written = torch.tensor(text.tokens[start:], device=tokens_LC.device)
    is_next_MC = tokens_LC[start - 1 : -1] == written[:, None]
    return log_probs_LC[start - 1 : -1].numpy(force=True), is_next_MC.numpy(force=True)


def _record(tree: TokenTree, seed: Seed, text: Sequence[int]) -> TreeRecord:
    """A tree, judged by what really follows."""
    end = seed.root_pos + 1
    follows = torch.tensor(
        [text[end + depth] if end + depth < len(text) else -1 for depth in tree.depth_N.tolist()]
    )
    path = set(tree.walk(follows))
    return TreeRecord(
        seed.width, tuple(tree.log_prob_N.tolist()), tuple(node in path for node in range(len(tree)))
    )
