"""Calibration texts and traces: trees drafted along the target's text, with its hidden states.

Shapes: L = tokens of a text; here M = tokens after a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from yggdrasil.errors import ConfigError
from yggdrasil.models.packing import Chunk
from yggdrasil.models.protocol import TokenGraphs
from yggdrasil.offline.budget import EVERY, CalibrationSize
from yggdrasil.offline.forced import average_children, forced_lengths
from yggdrasil.offline.forest import Seed, coupled_on_host, grow_forest
from yggdrasil.offline.written import Written, outputs_of
from yggdrasil.policy.acceptance import TreeRecord, fit_platt
from yggdrasil.policy.depth import Array
from yggdrasil.step.coupling import read_of
from yggdrasil.step.platt import UNSCALED, PlattScale
from yggdrasil.text.tokenizer import Tokenizer
from yggdrasil.tree import TokenTree

__all__ = [
    "BUNDLED_TEXT",
    "CALIBRATION_TEXT",
    "PASSAGES",
    "PROMPT_LEN",
    "Forced",
    "Passage",
    "Traces",
    "beginnings",
    "check_lengths",
    "drafted_traces",
    "forced_positions",
    "further_passages",
    "read_texts",
    "text_edges",
]

Indices = npt.NDArray[np.int64]

CALIBRATION_TEXT = Path(__file__).parent.parent / "data" / "calibration.jsonl"
BUNDLED_TEXT = "stories"  # its name
PROMPT_LEN = 24  # tokens of a calibration text that serve as its prompt
PASSAGES = 8  # prompts from one text: other texts teach more than other positions of the same text


def read_texts(path: Path) -> list[str]:
    """The texts of a calibration file.

    Raises:
        ConfigError: the file is missing, unreadable or without text.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")  # with the mark of Windows or without
        # a text may have other line ends, such as U+2028, within a line of JSON
        lines = enumerate(content.split("\n"), start=1)
        texts = (
            [_text_of(line, number) for number, line in lines if line.strip()]
            if path.suffix == ".jsonl"
            else content.split("\n\n")
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            "calibration", str(path), 'a text file, or a .jsonl with a "text" in every line', str(error)
        ) from None
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ConfigError("calibration", str(path), "a file with at least one text")
    return texts


def _text_of(line: str, number: int) -> str:
    """The text of a line of JSON. Raises ValueError with the line's number if it has none."""
    try:
        payload = json.loads(line)
        if not isinstance(payload, dict) or not isinstance(payload.get("text"), str):
            raise ValueError('it has no "text" that is a string')
        text: str = payload["text"]
        text.encode()  # JSON can spell half a character
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number}: {error}") from None
    return text


def beginnings(texts: Sequence[str], tokenizer: Tokenizer, calibration: str) -> list[list[int]]:
    """Prompts from texts: at most PROMPT_LEN tokens of each, at least two.

    Args:
        calibration: As `check_lengths` has it.

    Raises:
        ConfigError: no text has two tokens.
    """
    prompts = [tokens[:PROMPT_LEN] for tokens in _encoded(texts, tokenizer)]
    check_lengths(prompts, calibration)
    return prompts


def check_lengths(tokens: Iterable[Sequence[int]], calibration: str) -> None:
    """Raise ConfigError unless a text has two tokens; reads on to the first one that has.

    Args:
        tokens: Of every text.
        calibration: Path of the texts for the error; empty for the bundled ones.
    """
    if all(len(each) < 2 for each in tokens):
        path = calibration or str(CALIBRATION_TEXT)
        raise ConfigError(
            "calibration",
            path,
            "a file with at least one text of two tokens",
            "ygg compile TARGET DRAFT --calibration FILE",
        )


class Passage(NamedTuple):
    """A prompt from the middle of a calibration text.

    Args:
        text: Place of the text among those of `beginnings`.
        tokens: PROMPT_LEN tokens.
    """

    text: int
    tokens: list[int]


def further_passages(texts: Sequence[str], tokenizer: Tokenizer) -> list[Passage]:
    """Further prompts from the texts of `beginnings`: the second ones of all texts, then the third ones.

    A text has up to PASSAGES prompts, spread over it, if it is long enough for them.
    """
    encoded = _encoded(texts, tokenizer)
    counts = [min(PASSAGES, len(tokens) // PROMPT_LEN) for tokens in encoded]
    return [
        Passage(text, tokens[start : start + PROMPT_LEN])
        for place in range(1, PASSAGES)
        for text, (tokens, count) in enumerate(zip(encoded, counts, strict=True))
        if place < count
        for start in (place * len(tokens) // count,)
        if start + PROMPT_LEN <= len(tokens)
    ]


def _encoded(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The texts with at least two tokens."""
    return [tokens for tokens in map(tokenizer.encode, texts) if len(tokens) > 1]


@dataclass(frozen=True)
class Forced:
    """Positions of target text whose accepted lengths follow from one pass of the draft.

    Args:
        hidden_NE: (N, E) the target's last hidden states.
        root_N: (N,) the token after each, from which the tree would grow.
        text_N: (N,) text of each position.
        length_N: (N,) draft tokens that the target accepts, see `forced_lengths`.
    """

    hidden_NE: Array
    root_N: Indices
    text_N: Indices
    length_N: Indices


@dataclass(frozen=True)
class Traces:
    """Positions of target text at one temperature.

    Args:
        temperature: Sampling temperature of the target.
        hidden_NE: (N, E) the target's last hidden states.
        root_N: (N,) the token after each, the root of its tree.
        text_N: (N,) text of each position; training and test sets split by text.
        deep: N trees of the reference width and of the largest depth.
        others: Trees of the other widths at some of the positions.
        forced: Positions of these texts, and of other passages, without trees.
        platt: Scale of the draft's probabilities; all trees were grown with it.
    """

    temperature: float
    hidden_NE: Array
    root_N: Indices
    text_N: Indices
    deep: tuple[TreeRecord, ...]
    others: tuple[TreeRecord, ...]
    forced: Forced
    platt: PlattScale = UNSCALED

    @property
    def sampled(self) -> tuple[TreeRecord, ...]:
        """Trees of every width, the same number of each, for the calibration of acceptance."""
        return (*self.deep[::EVERY], *self.others)


def _candidates(
    draft: TokenGraphs, texts: Sequence[Written], tick: Callable[[int], None]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The draft's candidates after every token of every text and their log-probabilities, (L, C) each.

    Of a prompt, only the candidates after its last token are defined. Those of sampled texts are coupled.
    """
    chunks = [
        Chunk(row, text.tokens, 0, len(text.tokens) - text.prompt_len + 1, read_of(text.sampling))
        for row, text in enumerate(texts)
    ]
    parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in texts]
    for row, tokens_LM, log_probs_LM in outputs_of(draft, chunks, tick):
        parts[row].append((tokens_LM.clone(), log_probs_LM.clone()))
    candidates = []
    for text, of_row in zip(texts, parts, strict=True):
        first = text.prompt_len - 1
        tokens_LM = torch.cat([tokens for tokens, _ in of_row])
        log_probs_LM = torch.cat([log_probs for _, log_probs in of_row])
        tokens, log_probs = coupled_on_host(
            tokens_LM[first:],
            log_probs_LM[first:],
            range(first + 1, len(text.tokens) + 1),
            text.sampling,
            draft.num_candidates,
        )
        best = slice(draft.num_candidates)
        candidates.append(
            (
                torch.cat((tokens_LM[:first, best], tokens[:, best])),
                torch.cat((log_probs_LM[:first, best], log_probs[:, best])),
            )
        )
    return candidates


def drafted_traces(
    draft: TokenGraphs,
    texts: Sequence[Written],
    sources: Sequence[int],
    temperature: float,
    size: CalibrationSize,
    *,
    tick: Callable[[int], None],
) -> Traces:
    """Draft trees along the texts and record which of their nodes the texts follow.

    First the draft's candidates along the texts give the scale of the edges; the trees grow with it. Growth
    is greedy, so a deep tree contains all shallower ones, and one pass over the text judges them all.

    Args:
        draft: Draft over pages with `size.num_texts` rows, with room for a text and a tree.
        texts: Texts of one temperature, of the length in `size`. The first `size.num_texts` get trees.
        sources: The calibration text of each; there may be more of them.
        tick: Called with the number of tokens that have run.
    """
    parts = [texts[first : first + size.num_texts] for first in range(0, len(texts), size.num_texts)]
    others = [outputs for part in parts[1:] for outputs in _candidates(draft, part, tick)]
    candidates = _candidates(draft, parts[0], tick)  # last, since the trees continue from this KV
    edges = [text_edges(*outputs, text) for outputs, text in zip(candidates, parts[0], strict=True)]
    platt = fit_platt(*map(np.concatenate, zip(*edges, strict=True)))
    forced = forced_positions(texts, [*candidates, *others], sources, size, platt)
    ends = [size.root_ends(row, text.prompt_len) for row, text in enumerate(parts[0])]
    records: dict[tuple[int, int, int], TreeRecord] = {}
    for seed, tree in grow_forest(draft, _seeds(parts[0], ends, candidates, size, platt)):
        records[seed.row, seed.root_pos + 1, seed.width] = _record(tree, seed, texts[seed.row].tokens)
        tick(len(tree) - 1 - seed.width)
    places = [(row, end) for row, of_row in enumerate(ends) for end in of_row]
    deep = tuple(records[row, end, size.reference_width] for row, end in places)
    other_trees = tuple(
        records[row, end, width]
        for row, end in places[::EVERY]
        for width in size.widths
        if width != size.reference_width
    )
    hidden_NE = np.concatenate([_hidden(text, of_row) for text, of_row in zip(parts[0], ends, strict=True)])
    root_N = np.concatenate([_roots(text, of_row) for text, of_row in zip(parts[0], ends, strict=True)])
    text_N = np.array([sources[row] for row, _ in places])
    return Traces(temperature, hidden_NE, root_N, text_N, deep, other_trees, forced, platt)


def _hidden(text: Written, ends: Sequence[int]) -> Array:
    hidden_NE: Array = text.hidden_before(ends).float().numpy(force=True)
    return hidden_NE


def _roots(text: Written, ends: Sequence[int]) -> Indices:
    return np.array([text.tokens[end - 1] for end in ends], dtype=np.int64)


def forced_positions(
    texts: Sequence[Written],
    candidates: Sequence[tuple[torch.Tensor, torch.Tensor]],
    sources: Sequence[int],
    size: CalibrationSize,
    platt: PlattScale,
) -> Forced:
    """Accepted lengths of trees of the reference width at every position of the texts, without the trees.

    Args:
        candidates: The draft's candidates along each text, as for its trees.
        sources: The calibration text of each; there may be more of them.
    """
    edges = [text_edges(*outputs, text) for outputs, text in zip(candidates, texts, strict=True)]
    scaled = [platt.logs(torch.from_numpy(log_probs_MC)).double().numpy() for log_probs_MC, _ in edges]
    lengths = forced_lengths(
        np.concatenate([_windows(log_probs_MC, size) for log_probs_MC in scaled]),
        np.concatenate([_windows(is_next_MC, size) for _, is_next_MC in edges]),
        average_children(np.concatenate(scaled)),
        size.reference_width,
    )
    ends = [range(text.prompt_len, text.prompt_len + size.num_tokens) for text in texts]
    hidden_NE = np.concatenate([_hidden(text, of_text) for text, of_text in zip(texts, ends, strict=True)])
    root_N = np.concatenate([_roots(text, of_text) for text, of_text in zip(texts, ends, strict=True)])
    text_N = np.repeat(np.array(sources[: len(texts)]), size.num_tokens)
    return Forced(hidden_NE, root_N, text_N, lengths)


def _windows(edges_MC: npt.NDArray[Any], size: CalibrationSize) -> npt.NDArray[Any]:
    """(positions, D, C) the edges that begin at every position of a text."""
    windows = np.lib.stride_tricks.sliding_window_view(edges_MC, size.max_depth, axis=0)
    return windows[: size.num_tokens].swapaxes(1, 2)


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
                    text.sampling,
                )
                for width in widths
            ]
    return rows


def text_edges(
    tokens_LC: torch.Tensor, log_probs_LC: torch.Tensor, text: Written
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """(M, C) log-probabilities of the candidates for every token, and whether each is that token."""
    start = text.prompt_len
    written = torch.tensor(text.tokens[start:], device=tokens_LC.device)
    is_next_MC = tokens_LC[start - 1 : -1] == written[:, None]
    return log_probs_LC[start - 1 : -1].numpy(force=True), is_next_MC.numpy(force=True)


def _record(tree: TokenTree, seed: Seed, text: Sequence[int]) -> TreeRecord:
    """A tree, with the nodes that the text follows."""
    end = seed.root_pos + 1
    follows = torch.tensor(
        [text[end + depth] if end + depth < len(text) else -1 for depth in tree.depth_N.tolist()]
    )
    path = set(tree.walk(follows))
    return TreeRecord(
        seed.width, tuple(tree.log_prob_N.tolist()), tuple(node in path for node in range(len(tree)))
    )
