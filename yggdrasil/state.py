"""The state of one request between steps, and the result of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Protocol

from torch import Tensor

from yggdrasil.config import SamplingConfig
from yggdrasil.errors import ConfigError
from yggdrasil.picture import Svg
from yggdrasil.text.grammar import GrammarState
from yggdrasil.text.repeats import Repeats
from yggdrasil.text.tokenizer import Tokenizer
from yggdrasil.tree import TokenTree

__all__ = [
    "PLAIN",
    "DecodeState",
    "Head",
    "HostHidden",
    "Inspection",
    "Row",
    "Shape",
    "StepMs",
    "StepResult",
    "StopRule",
    "truncate",
]


class StopRule(Protocol):
    """Ends drafting before its full depth, according to the draft's own probabilities."""

    def enough(self, tree: TokenTree) -> bool:
        """Whether the tree so far is deep enough.

        On a device this waits for the draft, so the default policies have a rule only on a CPU.
        """
        ...

    @property
    def numbers(self) -> tuple[Tensor, float] | None:
        """The same rule for the loop in kernels/step.cpp; None for a rule that exists only in Python.

        Either the costs of nodes by rank, float64, and the minimum gain of a step; or an empty tensor and
        the minimum log-probability of the last edge.
        """
        ...


@dataclass(frozen=True)
class Shape:
    """The shape of one step.

    Args:
        width: W, nodes attached per growth step.
        depth: D, growth steps; with 0 no draft runs.
        verify: K, maximum nodes verified, root included; None lets pruning choose from the menu.
        levels: A static tree instead of equal growth: levels[d] holds the (parent node, rank among the
            parent's children) of every node at depth d + 1, in the order of their ids. W is then the widest
            level and D the number of levels.
        stop: Ends the growth early.
        graft: Most nodes that repeat an earlier part of the text: a chain under the root. Growth starts at
            all of them. Without growth steps they are the tree; without both it is plain decoding.

    Raises:
        ConfigError: a width or K below 1, or a depth below 0; levels that are not a tree: a parent outside
            the level before, a place used twice, or a width or depth that differs from the levels'; a graft
            on levels.
    """

    width: int
    depth: int
    verify: int | None = None
    levels: tuple[tuple[tuple[int, int], ...], ...] | None = None
    stop: StopRule | None = None
    graft: int = 0

    def __post_init__(self) -> None:
        verify = 1 if self.verify is None else self.verify
        counts = (("width", self.width, 1), ("depth", self.depth, 0), ("verify", verify, 1))
        for name, count, minimum in counts:
            if not isinstance(count, int) or count < minimum:
                raise ConfigError(name, count, f"a whole number, at least {minimum}")
        if self.levels is not None:
            self._check_levels(self.levels)
        if self.graft < 0 or (self.graft and self.levels is not None):
            raise ConfigError("graft", self.graft, "0 for a static shape, else 0 or more")

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
        """N = 1 + W * D and the grafted nodes, or the size of the static tree."""
        if self.levels is not None:
            return 1 + sum(map(len, self.levels))
        return 1 + self.width * self.depth + self.graft

    def check_compiled(self, *, num_candidates: int, max_depth: int) -> None:
        """Raise ConfigError for a tree wider or deeper than what was compiled.

        Args:
            num_candidates: C, children that a node can have.
            max_depth: Most growth steps.
        """
        ranks = [rank for level in self.levels or () for _, rank in level]
        width = self.width if self.levels is None else 1 + max(ranks, default=0)
        if width > num_candidates:
            allowed = f"from 1 to {num_candidates}, the children that a node of this pair can have"
            raise ConfigError("width", width, allowed)
        if self.depth > max_depth:
            allowed = f"from 0 to {max_depth}, the growth steps that this pair was compiled for"
            raise ConfigError("depth", self.depth, allowed)

    def most_nodes(self, longest_path: int) -> int:
        """The most nodes of a tree whose paths have at most this many edges.

        A graft that leaves a path no room for all growth steps takes their place.
        """
        spare = max(0, longest_path - self.depth)
        return self.num_nodes - max(0, self.graft - spare)

    def __repr__(self) -> str:
        """The call that makes it, without what is left at its default."""
        given = [each for each in fields(self) if getattr(self, each.name) != each.default]
        values = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in given)
        return f"Shape({values})"

    def __str__(self) -> str:
        if self.depth == 0:
            return f"repeats of {self.graft}" if self.graft else "plain"
        size = f"W={self.width}" if self.levels is None else f"static N={self.num_nodes}"
        verify = "auto" if self.verify is None else self.verify
        stop = f" {self.stop}" if self.stop else ""
        return f"{size} D={self.depth} K={verify}{stop}"


PLAIN = Shape(1, 0, 1)


@dataclass(frozen=True)
class Head:
    """The draft's candidates after a root, known before the step that grows from it.

    Args:
        root_pos: Position of that root.
        tokens_1M: (1, M) the best next tokens.
    """

    root_pos: int
    tokens_1M: Tensor
    log_probs_1M: Tensor


@dataclass(frozen=True, slots=True)
class HostHidden:
    """A hidden state in the host's memory, for callers that need no tensor of it.

    Args:
        address: Of its first number.
        item_bytes: Bytes of a number: 2 for bf16, 4 for fp32.
        as_tensor: Returns it, (E,).
    """

    address: int
    item_bytes: int
    as_tensor: Callable[[], Tensor]

    def __call__(self) -> Tensor:
        return self.as_tensor()


@dataclass
class DecodeState:
    """One request. The last token is the root of the next tree: emitted, but in no model's KV yet.

    Attributes:
        tokens: Prompt and emitted tokens. They only grow; another text needs another request.
        grammar: Which tokens may come next, if the request has a grammar.
        hidden_of: Returns `hidden_E` until the target's next forward overwrites it; None before the first.
        head: The head draft if it ran ahead of time; its root's KV is then provisional in the draft's
            cache.
        top_logit: The target's largest logit before the root if the request has processors; at first 0.
        inspect: Whether the results of its steps have an `Inspection`.
        repeats: What repeats in `tokens`, as far as a step has read them.
    """

    tokens: list[int]
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    prompt_len: int = 0
    grammar: GrammarState | None = None
    hidden_of: Callable[[], Tensor] | None = None
    head: Head | None = None
    top_logit: Tensor | float = 0.0
    inspect: bool = False
    repeats: Repeats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.prompt_len = self.prompt_len or len(self.tokens)
        self.repeats = Repeats(self.prompt_len)

    @property
    def hidden_E(self) -> Tensor | None:
        """The target's last hidden state, (E,), of the last token in its KV; None at the start."""
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
    """A request's row in a batch, and how much of its text is in each model's KV.

    Attributes:
        row: Row of the page table.
        target_len: Committed tokens in the target's KV.
        draft_len: Committed tokens in the draft's KV.
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
        """Tokens before the root that the draft's KV lacks."""
        return self.state.root_pos - self.draft_len


@dataclass(frozen=True, eq=False)
class Inspection:
    """What a step looked at and did not emit, for a request that asks for it.

    Args:
        tree: The drafted tree without padding, before pruning.
        kept: The id in it of every verified node, ascending.
        target_tokens: (K,) the target's own token after every verified node. Pruned nodes have none: the
            target did not run them.
    """

    tree: TokenTree
    kept: Sequence[int]
    target_tokens: Sequence[int]


class StepMs(NamedTuple):
    """What the parts of a step took, in milliseconds; catching up is none of them.

    Args:
        head: The draft's first forward, which finds other weights in the processor's caches. 0 where
            `growth` includes it.
        growth: The rest of drafting.
        verify: The target's forward.
        host: Everything else.
    """

    head: float
    growth: float
    verify: float
    host: float


@dataclass(frozen=True)
class StepResult:
    """The result of one step.

    Args:
        tokens: Emitted tokens: the accepted draft tokens, then the target's own (the bonus). Fewer if the
            text ends among them.
        drafted: Nodes of the drafted tree, root included, padding not (step/prune.py).
        verified: Nodes of the verified tree, root included: its K.
        context_len: Committed tokens before the root.
        predicted_emitted: Emitted tokens that the calibration expected of the verified tree.
        tree_of: Makes the verified tree.
        path: Accepted nodes of that tree, root first.
        ms: Wall clock of the step.
        caught_up: Whether the step ran text that a model's KV lacked, instead of drafting: the long end of
            a prompt, or a chunk of text for the draft. The shape is then plain.
        error: What is wrong with the target's logits; then no token is emitted.
        values: Calibrated acceptance of every drafted node but the root.
        depths: Depth in the tree of every verified node, root included.
        is_guarded: Whether a guard watches the session and may end its speculation.
        inspection: The drafted tree and the target's tokens, if `GenerateConfig.inspect` asks for them.
        parts: What `ms` is made of; None outside C++.
    """

    tokens: list[int]
    shape: Shape
    drafted: int
    verified: int
    context_len: int
    predicted_emitted: float
    tree_of: Callable[[], TokenTree] = field(repr=False)
    path: list[int]
    ms: float = 0.0
    caught_up: bool = False
    error: str = ""
    values: Sequence[float] = field(default=(), repr=False)
    depths: Sequence[int] = field(default=(), repr=False)
    is_guarded: bool = False
    inspection: Inspection | None = None
    parts: StepMs | None = None

    @property
    def tree(self) -> TokenTree:
        """The verified tree."""
        return self.tree_of()

    def to_svg(self, tokenizer: Tokenizer) -> Svg:
        """The step as a picture: the verified tree, or with an inspection the drafted one."""
        tree = self.tree if self.inspection is None else self.inspection.tree
        kept = None if self.inspection is None else self.inspection.kept
        path = self.path if kept is None else [kept[node] for node in self.path]
        labels = [tokenizer.token_text(token) for token in tree.token_N.tolist()]
        bonus = tokenizer.token_text(self.tokens[-1]) if len(self.tokens) == len(path) else ""
        return tree.to_svg(labels, path, kept=kept, bonus=bonus)

    @property
    def accepted(self) -> int:
        """Accepted draft tokens, also those after the end of the text."""
        return len(self.path) - 1

    @property
    def is_plain(self) -> bool:
        """Whether no draft ran and the target verified the root alone."""
        return self.shape.depth == 0 and self.verified == 1


def truncate(tokens: list[int], *, room: int, eos_tokens: Collection[int]) -> list[int]:
    """The tokens up to the first end-of-text token, that one included, and at most `room` tokens."""
    for place, token in enumerate(tokens[:room]):
        if token in eos_tokens:
            return tokens[: place + 1]
    return tokens[:room]
