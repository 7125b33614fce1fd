"""Text that the target writes after calibration prompts, in batches, with its hidden states.

Shapes: L = tokens of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from yggdrasil.config import SamplingConfig
from yggdrasil.errors import YggError
from yggdrasil.models.packing import Chunk
from yggdrasil.models.protocol import TokenGraphs
from yggdrasil.state import DecodeState, Row
from yggdrasil.step.accept import choose_rows, follow
from yggdrasil.step.growth import run_chunks
from yggdrasil.step.verify import undrafted

__all__ = ["Written", "outputs_of", "write_texts"]


@dataclass(frozen=True)
class Written:
    """A text of the target.

    Args:
        tokens: The prompt and the target's text after it.
        prompt_len: Tokens of the prompt, at least two.
        sampling: How its tokens were chosen.
        hidden_LE: The target's last hidden states, from the second last token of the prompt to the second
            last of the text.
    """

    tokens: Sequence[int]
    prompt_len: int
    sampling: SamplingConfig
    hidden_LE: torch.Tensor

    def hidden_before(self, ends: Sequence[int]) -> torch.Tensor:
        """(N, E) hidden states known when the token at index `end - 1` is the root: of the token before."""
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
    """Decode every prompt at every temperature with the target, one token of every row per forward.

    Args:
        target: Target over pages of `num_rows` rows.
        prompts: Token lists of at least two tokens.
        temperatures: Sampling temperatures. The index of a prompt is its seed; the engine would write the
            same text with that seed.
        num_tokens: Tokens of every text after its prompt; end-of-text tokens are ignored.
        num_rows: Texts at a time.
        tick: Called with the number of tokens that have run.

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
    last = {row: hidden_LE[-1].clone() for row, _, hidden_LE in outputs_of(target, prompts, tick)}
    hidden = [[last[row.row]] for row in rows]
    for _ in range(num_tokens):
        roots = [Chunk(row.row, row.state.tokens[-1:], row.state.root_pos) for row in rows]
        outputs = [
            (logits_1V.clone(), hidden_1E[0].clone())
            for _, logits_1V, hidden_1E in outputs_of(target, roots, tick)
        ]
        _append_(target, rows, torch.cat([logits_1V for logits_1V, _ in outputs]))
        for of_row, (_, hidden_E) in zip(hidden, outputs, strict=True):
            of_row.append(hidden_E)
    return [
        Written(row.state.tokens, row.state.prompt_len, row.state.sampling, torch.stack(of_row))
        for row, of_row in zip(rows, hidden, strict=True)
    ]


def _append_(target: TokenGraphs, rows: Sequence[Row], logits_BV: torch.Tensor) -> None:
    """Append every row's next token of plain decoding."""
    plain = undrafted(target, rows)
    chosen = choose_rows(rows, plain, logits_BV, range(len(rows)))
    outcomes = follow([each.tree for each in plain], chosen)
    for row, accepted in zip(rows, outcomes, strict=True):
        if isinstance(accepted, YggError):
            raise accepted
        row.state.tokens.extend(accepted.tokens)


def outputs_of(
    model: TokenGraphs, chunks: Sequence[Chunk], tick: Callable[[int], None]
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Row and both outputs of every chunk, (L, ...) each; a chunk longer than a forward comes in parts.

    Aliasing: on CUDA overwritten by the next replay.
    """
    for batch, outputs in run_chunks(model, chunks, model.prefill_chunk):
        lens = [len(chunk.tokens) for chunk in batch]
        for chunk, first, second in zip(
            batch, *(torch.split(output[: sum(lens)], lens) for output in outputs), strict=True
        ):
            yield chunk.row, first, second
        tick(sum(lens))
