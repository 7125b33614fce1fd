"""A tree that decodes, call by call: the paper's abstraction over the stages of step/rows.py.

    grow_with     the draft grows the tree under the last token of the text
    prune_        the nodes with the largest acceptance stay
    verify_with   the target runs the nodes; the accepted path enters the text, and the next root remains

```
index of KV     0 .. root_pos-1 | root_pos + n                   | root_pos + drafted_node[n]
                the text        | node n, in the target's cache  | node n, in the draft's cache
```

The slots belong to the text's row; a tree knows which of them its nodes have.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from yggdrasil.errors import ConfigError, YggError
from yggdrasil.models.protocol import TokenModel
from yggdrasil.state import PLAIN, DecodeState, Row, Shape
from yggdrasil.step.accept import choose_rows, follow
from yggdrasil.step.choice import VERIFY_ALL, Calibration, Choice, VerifyMenu, verify_most
from yggdrasil.step.growth import RowDraft, catch_up_rows_, draft_rows, root_of
from yggdrasil.step.prune import Pruned, drafted_nodes, prune_rows
from yggdrasil.step.rows import commit_row_
from yggdrasil.step.verify import verify_rows
from yggdrasil.tree import TokenTree

__all__ = ["DecodingTree"]


class DecodingTree(TokenTree):
    """A `TokenTree` with the KV slots of its nodes, which the draft grows and the target verifies.

    Between two verifications it is a tree like any other: it draws itself, and nodes can be attached by
    hand (`grow`); the target verifies them too. The text is the target's own, whatever the nodes are.

    Args:
        state: The text. Its last token is the root; the target's KV has the tokens before it.
        target: Verifies.
        draft: Grows.
        calibration: From the draft's probabilities to acceptance.
        capacity: Most nodes, root included.
        alone: A block in which no other text uses the models' KV; raises YggError if one has replaced this
            text there.

    Attributes:
        row: The text, and how much of it is in each model's KV.
        drafted_node: The id that each node had when the draft grew it. Nodes that were attached by hand
            have none: they come after the others.

    Example: `load_pair().tree(prompt)` makes one; examples/loop.py is the whole loop.
        >>> from yggdrasil import Shape, load_pair
        >>> def write():
        ...     pair = load_pair()
        ...     tree = pair.tree("Once upon a time")
        ...     tree.grow_with(pair.engine.draft, Shape(width=4, depth=4))
        ...     tree.prune_(8)
        ...     print(pair.tokenizer.decode(tree.verify_with(pair.engine.target)))

    Source: Yggdrasil section 6. Departure: the KV storage belongs to the models, see DESIGN.md.
    """

    def __init__(
        self,
        state: DecodeState,
        target: TokenModel,
        draft: TokenModel,
        calibration: Calibration,
        *,
        capacity: int,
        alone: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(capacity, draft.max_depth, draft.device)
        self.row = Row(0, state)
        self._target = target
        self._draft = draft
        self._calibration = calibration
        self._alone = alone
        self._begin_()

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, after {self.row.state.root_pos} tokens)"

    def grow_with(self, draft: TokenModel, shape: Shape) -> None:
        """Attach the nodes that the draft grows under the root: W at a time, D times, anywhere.

        Args:
            draft: The engine's draft; its KV of the nodes is provisional.
            shape: W, D and grafts; its K, if it has one, prunes the tree.

        Raises:
            ConfigError: another model, a shape wider or deeper than the draft's graphs, or a tree that has
                grown already.
            CapacityError: the caches cannot hold both the text and the tree.
            YggError: another text has begun on the engine.

        Cost: that of `draft_rows`, and one sync.
        """
        _check_model("draft", draft, self._draft)
        shape.check_compiled(num_candidates=draft.num_candidates, max_depth=draft.max_depth - 1)
        with self._alone():
            self._synchronise_()
            if len(self) > 1:
                raise ConfigError("nodes", len(self), "1: a tree grows from its root; verify it first")
            self._reserve(shape.most_nodes(draft.max_depth - 1))
            catch_up_rows_(draft, [self.row])
            choice = Choice((shape,), (self._calibration,), VERIFY_ALL)
            [drafted] = draft_rows(draft, [self.row], choice, vocab=self._target.vocab)
            draft.cache.kept_(self.row.draft_len)
            self._prune_(drafted, VERIFY_ALL)

    def prune_(self, k: int) -> None:
        """Keep the `k` nodes with the largest calibrated acceptance of those that the draft grew.

        Args:
            k: K: nodes to keep, root included. Nodes that were attached by hand are dropped.

        Raises:
            ConfigError: `k` below one.

        Cost: a sort on the host, and one sync.
        """
        if k < 1:
            raise ConfigError("k", k, "at least 1: the root stays")
        self._prune_(self._drafted, verify_most(k - 1))

    def verify_with(self, target: TokenModel) -> list[int]:
        """Run the nodes through the target and accept a path of them.

        Args:
            target: The engine's target.

        Returns:
            The emitted tokens, which are now part of the text: the accepted ones and the target's own after
            them. They go on after an end-of-text token; see `yggdrasil.state.truncate`. What remains of the
            tree is its next root.

        Raises:
            ConfigError: another model, or a node attached by hand whose token is not in the vocabulary.
            ShapeNotCompiled: more nodes than any graph takes; `prune_` them.
            CapacityError: the caches cannot hold both the text and the tree.
            YggError: the target's logits are not finite, or another text has begun on the engine.

        Cost: one forward of the target, and two syncs; one more with nodes attached by hand.
        """
        _check_model("target", target, self._target)
        with self._alone():
            self._synchronise_()
            self._check_tokens()
            self._reserve(len(self))
            by_hand = range(len(self._drafted.tree), len(self._drafted.tree) + len(self))
            nodes = [*self.drafted_node, *by_hand][: len(self)]
            pruned = Pruned(self, nodes, self.depth_N.tolist(), 1.0)
            logits_NV, _, roots = verify_rows(target, [self.row], [pruned], ())
            chosen = choose_rows([self.row], [pruned], logits_NV, roots)
            [accepted] = follow([self], chosen)
            if isinstance(accepted, YggError):
                raise accepted
            if self.row.state.sampling.processors is not None:
                self.row.state.top_logit = chosen[0].score_K[accepted.path[-1]]
            commit_row_(target, self._draft, self.row, self._drafted, pruned, accepted)
            target.cache.kept_(self.row.target_len)
            self._draft.cache.kept_(self.row.draft_len)
            self._begin_()
        return accepted.tokens

    def _begin_(self) -> None:
        """The root alone: the last token of the text."""
        self._prune_(RowDraft(root_of(self._draft, self.row), 0, PLAIN), VERIFY_ALL)
        self._root_pos = self.row.state.root_pos

    def _synchronise_(self) -> None:
        """Drop what an interrupted call left: KV after the root, and a tree whose path is in the text."""
        for model in (self._target, self._draft):
            model.cache.rollback_(min(model.cache.len, self.row.state.root_pos))
        self.row.target_len = self._target.cache.len
        self.row.draft_len = self._draft.cache.len
        if self._root_pos != self.row.state.root_pos:
            self._begin_()

    def _check_tokens(self) -> None:
        """Raise ConfigError if a node that was attached by hand has a token that no embedding has."""
        vocab = self._target.vocab
        by_hand_N = self.token_N[len(self.drafted_node) :]
        unknown = [token for token in by_hand_N.tolist() if not 0 <= token < vocab]
        if unknown:
            raise ConfigError("tokens", unknown, f"token ids from 0 to {vocab - 1}")

    def _reserve(self, num_nodes: int) -> None:
        for model in (self._target, self._draft):
            model.cache.reserve(self.row.state.root_pos - model.cache.len + num_nodes)

    def _prune_(self, drafted: RowDraft, menu: VerifyMenu) -> None:
        """Take over the nodes of a drafted tree that pruning keeps; an interrupt leaves the root or all."""
        choice = Choice((drafted.shape,), (self._calibration,), menu)
        [pruned] = prune_rows([drafted], drafted_nodes([drafted], choice), menu)
        self._require_room(len(pruned.tree) - len(self))
        self.drafted_node = pruned.drafted_node[:1]  # a node without an id counts as attached by hand
        self._len = 1
        for own, kept in zip(self.arrays, pruned.tree.arrays, strict=True):
            own[: len(pruned.tree)] = kept[: len(pruned.tree)]
        self._drafted = drafted
        self._len = len(pruned.tree)
        self.drafted_node = pruned.drafted_node


def _check_model(role: str, model: TokenModel, own: TokenModel) -> None:
    if model is not own:
        allowed = f"the {role} of the engine that made the tree, whose KV has its text"
        raise ConfigError(role, type(model).__name__, allowed, f"pair.engine.{role}")
