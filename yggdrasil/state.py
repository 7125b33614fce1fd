"""The state of one request between steps, and what a step reports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from yggdrasil.config import SamplingConfig
from yggdrasil.errors import ConfigError
from yggdrasil.tree import TokenTree

__all__ = ["PLAIN", "DecodeState", "Head", "Row", "Shape", "StepResult", "StopRule", "truncate"]


class StopRule(Protocol):
    """Ends drafting before its depth, for structures whose length follows the draft's own confidence."""

    def enough(self, tree: TokenTree) -> bool:
        """Whether the tree so far is deep enough. On a device this waits for the draft: the default
        policies have a rule on a CPU alone.
        """
        ...

    @property
    def native(self) -> tuple[Tensor, float] | None:
        """The same for the loop in kernels/graph.cpp: prices of nodes by rank, float64, and the least that
        a step must gain over them; without prices, the least log-probability of the last edge. None for a
        rule that is Python's alone."""
        ...


@dataclass(frozen=True)
class Shape:
    """The shape of one step.

    Args:
        width: W, nodes attached per growth step.
        depth: D, growth steps; 0 decodes plainly.
        verify: K, most nodes verified, root included; None lets pruning choose from the menu.
        levels: A static tree instead of equal growth: levels[d] holds the (parent node, rank among the
            parent's children) of every node at depth d + 1, in the order of their ids. W is then the widest
            level and D the number of levels.
        stop: Ends the growth early.

    Raises:
        ConfigError: levels that are no tree: a parent that is not of the level before, a place taken twice,
            another width or depth than theirs.
    """

    width: int
    depth: int
    verify: int | None = None
    levels: tuple[tuple[tuple[int, int], ...], ...] | None = None
    stop: StopRule | None = None

    def __post_init__(self) -> None:
        if self.levels is not None:
            self._check_levels(self.levels)

    def _check_levels(self, levels: tuple[tuple[tuple[int, int], ...], ...]) -> None:
        parents = range(1)
        for depth, level in enumerate(levels, start=1):
            for parent, rank in level:
                if parent not in parents:
                    allowed = f"under a node from {parents[0]} to {parents[-1]}, those of depth {depth - 1}"
                    raise ConfigError("levels", (parent, rank), allowed)
                if rank < 0:
                    raise ConfigError("levels", (parent, rank), "a child of rank 0 or above")
            if not level or len(set(level)) < len(level):
                raise ConfigError("levels", level, "at least one node a level, each at a place of its own")
            parents = range(parents.stop, parents.stop + len(level))
        shape = max(map(len, levels), default=1), len(levels)
        if (self.width, self.depth) != shape:
            allowed = f"{shape}, the widest level and the number of levels"
            raise ConfigError("width and depth", (self.width, self.depth), allowed)

    @property
    def num_nodes(self) -> int:
        """N = 1 + W * D, or the size of the static tree."""
        return 1 + self.width * self.depth if self.levels is None else 1 + sum(map(len, self.levels))

    def __str__(self) -> str:
        if self.depth == 0:
            return "plain"
        drafted = (
            f"W={self.width} D={self.depth}"
            if self.levels is None
            else f"static N={self.num_nodes} D={self.depth}"
        )
        return f"{drafted} K={'auto' if self.verify is None else self.verify}" + (
            f" {self.stop}" if self.stop else ""
        )


PLAIN = Shape(1, 0, 1)


@dataclass(frozen=True)
class Head:
    """The draft's candidates after a root, known before the iteration that grows from it.

    Args:
        root_pos: Position of that root.
        tokens_NC: (N, C) the best next tokens of all that ran in one forward.
        log_probs_NC: (N, C) their log-probabilities.
        row: Which of them are the root's.
    """

    root_pos: int
    tokens_NC: Tensor
    log_probs_NC: Tensor
    row: int

    @property
    def candidates(self) -> tuple[Tensor, Tensor]:
        """The root's, (1, C) each."""
        return self.tokens_NC[self.row : self.row + 1], self.log_probs_NC[self.row : self.row + 1]


@dataclass
class DecodeState:
    """One request. The last token is the root of the next tree: emitted, but in no model's KV yet.

    Attributes:
        tokens: Prompt and emitted tokens.
        prompt_len: How many of them are the prompt.
        sampling: How tokens are taken.
        hidden_of: Gives `hidden_E` until the target's next forward writes over it; None before the first.
        head: The head draft when it ran ahead of time; its root's KV is then provisional in the draft's
            cache.
    """

    tokens: list[int]
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    prompt_len: int = 0
    hidden_of: Callable[[], Tensor] | None = None
    head: Head | None = None

    def __post_init__(self) -> None:
        self.prompt_len = self.prompt_len or len(self.tokens)

    @property
    def hidden_E(self) -> Tensor | None:
        """The target's last hidden state of the last token in its KV, (E,); None before the first forward."""
        return None if self.hidden_of is None else self.hidden_of()

    @property
    def root_pos(self) -> int:
        """Position of the root: the number of tokens before it."""
        return len(self.tokens) - 1

    @property
    def emitted(self) -> Sequence[int]:
        return self.tokens[self.prompt_len :]

    @property
    def num_emitted(self) -> int:
        return len(self.tokens) - self.prompt_len


@dataclass(eq=False)
class Row:
    """A request's place in a batch, and how much of its text each model's KV holds.

    Attributes:
        row: Of the page table.
        state: The request.
        target_len: Committed tokens in the target's KV.
        draft_len: Committed tokens in the draft's.
    """

    row: int
    state: DecodeState
    target_len: int = 0
    draft_len: int = 0

    @property
    def is_prefilled(self) -> bool:
        """Whether the target's KV reaches the root, so that the next forward emits."""
        return self.target_len == self.state.root_pos

    @property
    def lag(self) -> int:
        """Tokens before the root that the draft has not seen."""
        return self.state.root_pos - self.draft_len


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Args:
        tokens: Emitted tokens: the accepted draft tokens, then the target's own (the bonus); fewer where
            the text ends among them.
        shape: The shape that was drafted, as deep as it was grown.
        drafted: Nodes of the drafted tree, root included.
        verified: Nodes of the verified tree, root included: its K.
        context_len: Committed tokens before the root.
        predicted_emitted: Emitted tokens that the calibration expected of the verified tree.
        tree_of: The verified tree, made when it is asked for.
        path: Accepted nodes in it, root first.
        ms: Wall clock of the step.
        caught_up: Whether the step was to draft, and made up a chunk of what the draft lagged behind
            instead; its shape is then plain.
    """

    tokens: list[int]
    shape: Shape
    drafted: int
    verified: int
    context_len: int
    predicted_emitted: float
    tree_of: Callable[[], TokenTree]
    path: list[int]
    ms: float = 0.0
    caught_up: bool = False

    @property
    def tree(self) -> TokenTree:
        """The verified tree."""
        return self.tree_of()

    @property
    def accepted(self) -> int:
        """Draft tokens that the target said too: one after which the text ends was not rejected."""
        return len(self.path) - 1


def truncate(tokens: list[int], *, room: int, eos_tokens: Collection[int]) -> list[int]:
    """Emitted tokens up to the first end of text, that one included, and at most `room` of them."""
    end = (
        next((place + 1 for place, token in enumerate(tokens) if token in eos_tokens), len(tokens))
        if eos_tokens
        else len(tokens)
    )
    return tokens[: min(end, room)]
