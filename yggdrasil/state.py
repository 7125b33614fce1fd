"""The state of one request between steps, and what a step reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from yggdrasil.config import SamplingConfig
from yggdrasil.tree import TokenTree

__all__ = ["PLAIN", "DecodeState", "Shape", "StepResult"]


@dataclass(frozen=True)
class Shape:
    """The shape of one step.

    Args:
        width: W, nodes attached per growth step.
        depth: D, growth steps; 0 decodes plainly.
        verify: K, most nodes verified, root included; None lets pruning choose from the menu.
    """

    width: int
    depth: int
    verify: int | None = None

    @property
    def num_nodes(self) -> int:
        """N = 1 + W * D."""
        return 1 + self.width * self.depth

    def __str__(self) -> str:
        return "plain" if self.depth == 0 else f"W={self.width} D={self.depth} K={'auto' if self.verify is None else self.verify}"


PLAIN = Shape(1, 0, 1)


@dataclass
class DecodeState:
    """One request. The last token is the root of the next tree: emitted, but in no model's KV yet.

    Attributes:
        tokens: Prompt and emitted tokens.
        prompt_len: How many of them are the prompt.
        sampling: How tokens are taken.
    """

    tokens: list[int]
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    prompt_len: int = 0

    def __post_init__(self) -> None:
        self.prompt_len = self.prompt_len or len(self.tokens)

    @property
    def root_pos(self) -> int:
        """Position of the root: the number of tokens before it."""
        return len(self.tokens) - 1

    @property
    def emitted(self) -> Sequence[int]:
        return self.tokens[self.prompt_len :]


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Args:
        tokens: Emitted tokens: the accepted draft tokens, then the target's own (the bonus).
        shape: The shape that was drafted.
        drafted: Nodes of the drafted tree, root included.
        verified: Nodes of the verified tree, root included: its K.
        context_len: Committed tokens before the root.
        predicted_emitted: Emitted tokens that the calibration expected of the verified tree.
        tree: The verified tree.
        path: Accepted nodes in it, root first.
    """

    tokens: list[int]
    shape: Shape
    drafted: int
    verified: int
    context_len: int
    predicted_emitted: float
    tree: TokenTree
    path: list[int]

    @property
    def accepted(self) -> int:
        """Draft tokens kept."""
        return len(self.tokens) - 1
