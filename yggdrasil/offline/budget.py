"""Choose the largest calibration that fits a budget of seconds.

Shapes: X = any further dimension.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from yggdrasil.config import SamplingConfig
from yggdrasil.models.packing import Chunk, pack_chains_
from yggdrasil.models.protocol import TokenGraphs
from yggdrasil.step.sampling import choose_tokens

__all__ = [
    "EVERY",
    "FEWEST_LEVELS",
    "FEWEST_ROOTS",
    "FEWEST_TEXTS",
    "STEP",
    "CalibrationSize",
    "PassClock",
    "largest_within",
    "seconds_of",
    "seconds_of_sampling",
]

STEP = 2  # a tree at every second position: neighbouring positions give nearly the same results
EVERY = 4  # every fourth root has trees of all widths, the others one of the reference width
FEWEST_TEXTS = 16  # fewer texts give too little information
FEWEST_ROOTS = 2  # roots per text
FEWEST_LEVELS = 4  # growth steps of the shallowest trees
PASSAGES_SHARE = 0.1
TIMED_PASSES = 2


@dataclass(frozen=True, kw_only=True)
class CalibrationSize:
    """Amount of text and trees at one temperature.

    Args:
        num_texts: Texts along which trees are drafted.
        num_passages: Texts that the target writes: these, and further ones for the depth predictor.
        num_tokens: Positions of each text that can be roots.
        stride: Distance of two roots, in positions.
        max_depth: Depth of every tree; a text is longer by this, to judge its last tree. The policy grows
            no tree deeper than this.
        reference_width: Width of the tree at every root; one root of `EVERY` has all widths.
    """

    num_texts: int
    num_passages: int
    num_tokens: int
    stride: int = STEP
    max_depth: int
    widths: tuple[int, ...]
    reference_width: int

    @property
    def num_written(self) -> int:
        """Tokens of a text after its prompt."""
        return self.num_tokens + self.max_depth

    def root_ends(self, text: int, prompt_len: int) -> range:
        """Lengths of a text up to each root; different texts start at different positions."""
        return range(prompt_len + STEP * text % self.stride, prompt_len + self.num_tokens, self.stride)

    @property
    def num_roots(self) -> int:
        """Trees of the reference width."""
        return sum(len(self.root_ends(text, 0)) for text in range(self.num_texts))

    @property
    def num_tree_tokens(self) -> int:
        """Nodes that the draft runs for all trees: no leaves, and no roots, which run with the text."""
        others = sum(self.widths) - self.reference_width
        return (self.num_roots * self.reference_width + -(-self.num_roots // EVERY) * others) * (
            self.max_depth - 1
        )

    def smaller(self) -> Iterator[CalibrationSize]:
        """This size, then fewer passages, fewer trees per text, fewer texts, and last shallower trees."""
        for num_passages in range(self.num_passages, self.num_texts, -FEWEST_TEXTS):
            yield replace(self, num_passages=num_passages)
        smallest = replace(self, num_passages=self.num_texts)
        for stride in range(self.stride, max(self.stride, self.num_tokens // FEWEST_ROOTS) + 1):
            smallest = replace(smallest, stride=stride)
            yield smallest
        for num_texts in range(self.num_texts - 1, FEWEST_TEXTS - 1, -1):
            smallest = replace(smallest, num_texts=num_texts, num_passages=num_texts)
            yield smallest
        for max_depth in range(self.max_depth - 1, FEWEST_LEVELS - 1, -1):
            yield replace(smallest, max_depth=max_depth)


class PassClock:
    """Seconds of a model's forwards by number of tokens; each graph is timed when it is first needed.

    Args:
        model: A model over pages; the first index of each row is overwritten.
        num_rows: Rows of its page table.
        now: Clock, in seconds.

    Attributes:
        num_columns: Columns of the first output; V for a target.
    """

    def __init__(
        self, model: TokenGraphs, num_rows: int, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._model = model
        self._num_rows = num_rows
        self._now = now
        self._seconds: dict[int, float] = {}
        self.num_columns = 0

    def __call__(self, num_tokens: int) -> float:
        """Seconds for `num_tokens`, in as few forwards as possible."""
        full, rest = divmod(num_tokens, self._model.prefill_chunk)
        return full * self._pass(self._model.prefill_chunk) + (self._pass(rest) if rest else 0.0)

    def _pass(self, num_tokens: int) -> float:
        size = len(self._model.meta(num_tokens))
        if size not in self._seconds:
            self._once(size)  # reads the weights from the disk
            self._seconds[size] = min(self._once(size) for _ in range(TIMED_PASSES))
        return self._seconds[size]

    def _once(self, size: int) -> float:
        meta_NM = self._model.meta(size)
        pack_chains_(meta_NM, [Chunk(row, [0], 0) for row in range(min(size, self._num_rows))])
        start = self._now()
        first_NX, second_NX = self._model.forward(meta_NM)
        second_NX[0].tolist()  # sync: a pass ends when its result has arrived
        self.num_columns = first_NX.shape[1]
        return self._now() - start


def seconds_of_sampling(vocab: int, now: Callable[[], float] = time.perf_counter) -> float:
    """Seconds to sample one token from `vocab` logits."""
    logits_1V = torch.zeros(1, vocab)
    first_1 = torch.zeros(1, dtype=torch.int64)
    sampling = SamplingConfig(temperature=1.0)
    times = []
    for position in range(1 + TIMED_PASSES):
        start = now()
        choose_tokens(logits_1V, [position], first_1, sampling)
        times.append(now() - start)
    return min(times)


def seconds_of(
    size: CalibrationSize,
    prompt_lens: Sequence[int],
    temperatures: Sequence[float],
    target: PassClock,
    draft: PassClock,
    *,
    target_rows: int,
    sampling_s: float,
) -> float:
    """Seconds that collecting traces will take.

    Args:
        prompt_lens: Tokens of each prompt; at least `size.num_passages` of them.
        target_rows: Texts that are written together.
        sampling_s: Seconds to sample one token.
    """
    prompts = sum(prompt_lens[: size.num_passages])
    whole, rest = divmod(size.num_passages * len(temperatures), target_rows)
    num_sampled = size.num_passages * sum(temperature > 0 for temperature in temperatures)
    step = whole * target(target_rows) + (target(rest) if rest else 0.0) + num_sampled * sampling_s
    writing = target(prompts * len(temperatures)) + size.num_written * step
    texts = draft(prompts + size.num_passages * size.num_written)
    together = size.num_texts * size.reference_width  # nodes that wait for a forward
    trees = size.num_tree_tokens / together * draft(together) if size.num_tree_tokens else 0.0
    return writing + len(temperatures) * (texts + trees)


def largest_within(
    whole: CalibrationSize, seconds: Callable[[CalibrationSize], float], budget_s: float
) -> CalibrationSize:
    """The largest calibration within the budget; if none is, the fewest texts and trees of the whole depth.

    Shallower trees limit the policy for ever, so they are taken only where they keep the budget. Where the
    target writes slowly they would not.
    Passages for the depth predictor take at most PASSAGES_SHARE of the budget: where growth stops by itself
    nothing uses them, and a large target writes slowly.
    """
    texts_s = seconds(replace(whole, num_passages=whole.num_texts))
    limit_s = min(budget_s, texts_s + PASSAGES_SHARE * budget_s)
    for size in whole.smaller():
        if seconds(size) <= limit_s:
            return size
    return replace(size, max_depth=whole.max_depth)
