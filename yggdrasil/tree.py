"""TokenTree: the tree of draft tokens that drafting grows, pruning cuts and acceptance walks.

```
node     0      1     2     3     4          token:    vocabulary id of the node
        root ── the ─ cat ─ sat              parent:   node id, -1 for the root
          └──── a ─── dog                    path:     node ids root .. self, -1 after it
```

Node 0 is the root: the last emitted token, whose KV no model has computed yet. A parent always has a
smaller id than its children, so any ascending set of nodes is in position order along every path.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from yggdrasil.errors import ConfigError
from yggdrasil.picture import Picture, Svg
from yggdrasil.staging import upload

if TYPE_CHECKING:
    import networkx

__all__ = ["TokenTree", "walk"]


class TokenTree:
    """A tree of candidate tokens over preallocated arrays; growth never reallocates and never syncs.

    Attributes (all of length `len(tree)`; A is the path capacity):
        token_N: Vocabulary ids, int32.
        parent_N: Node ids, int32, -1 for the root.
        depth_N: Edges from the root, int32.
        log_prob_N: Path log-probability, float32, 0 for the root: the draft's, with each edge scaled to
            the target's acceptance (step/platt.py).
        path_NA: Node ids from the root to the node itself, int32, -1 after it.

    Example: grow two children of the root and one grandchild, then walk with the target's tokens.
        >>> import torch
        >>> from yggdrasil import TokenTree
        >>> tree = TokenTree.root(token=5, capacity=8)
        >>> tree.grow(torch.tensor([0, 0]), torch.tensor([11, 12]), torch.tensor([-0.1, -2.5]))
        >>> tree.grow(torch.tensor([1]), torch.tensor([21]), torch.tensor([-0.4]))
        >>> tree.depth_N.tolist(), tree.leaves.tolist()
        ([0, 1, 1, 2], [2, 3])
        >>> tree.ancestor_mask().int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
        >>> print(tree.render())
        5
        ├── 11  -0.10
        │   └── 21  -0.40
        └── 12  -2.50
        >>> # the target's token is 11 after the root, 21 after node 1, 99 after node 3
        >>> tree.walk(torch.tensor([11, 21, 0, 99]))
        [0, 1, 3]

    Source: Yggdrasil section 6 (the TokenTree abstraction) and 4.2 (equal growth).
    """

    def __init__(self, capacity: int, max_depth: int, device: str = "cpu") -> None:
        self.capacity = capacity
        self.max_depth = max_depth
        self._len = 0
        self._token = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._parent = torch.full((capacity,), -1, dtype=torch.int32, device=device)
        self._depth = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._log_prob = torch.zeros(capacity, dtype=torch.float32, device=device)
        self._path = torch.full((capacity, max_depth + 1), -1, dtype=torch.int32, device=device)

    @classmethod
    def root(
        cls, token: int, capacity: int, *, max_depth: int | None = None, device: str = "cpu"
    ) -> TokenTree:
        """A tree of one node.

        Args:
            token: The last emitted token.
            capacity: Maximum number of nodes, root included.
            max_depth: Longest path in edges; `capacity - 1` when not given.

        Raises:
            ConfigError: a capacity below one or a negative token.
        """
        if capacity < 1:
            raise ConfigError("capacity", capacity, "at least 1")
        if token < 0:
            raise ConfigError("token", token, "a vocabulary id")
        tree = cls(capacity, capacity - 1 if max_depth is None else max_depth, device)
        # an assignment to one element would copy a number from the host, which is a sync
        tree._token[:1].fill_(token)
        tree._path[:1, :1].fill_(0)
        tree._len = 1
        return tree

    @classmethod
    def of(
        cls, token: Tensor, parent: Tensor, depth: Tensor, log_prob: Tensor, path: Tensor, *, length: int
    ) -> TokenTree:
        """A tree over arrays that an operator filled.

        Args:
            token: (capacity,) int32.
            parent: (capacity,) int32.
            depth: (capacity,) int32.
            log_prob: (capacity,) float32.
            path: (capacity, max_depth + 1) int32.
            length: Number of nodes in the arrays.

        Aliasing: the tree keeps the arrays. Nothing is checked; see `check`.
        """
        tree = cls.__new__(cls)
        tree.capacity = len(token)
        tree.max_depth = path.shape[1] - 1
        tree._len = length
        tree._token = token
        tree._parent = parent
        tree._depth = depth
        tree._log_prob = log_prob
        tree._path = path
        return tree

    @classmethod
    def unpacked(cls, block: Tensor, length: int) -> TokenTree:
        """A tree over one block of memory.

        Args:
            block: int32: (N,) tokens, (N,) parents, (N,) depths, (N,) log-probabilities as float32, and (N,
                max_depth + 1) paths, one after another.
            length: N, the tree's nodes and its capacity.

        Aliasing: the tree keeps the block.
        """
        token, parent, depth, log_prob = block[: 4 * length].view(4, length)
        return cls.of(
            token,
            parent,
            depth,
            log_prob.view(torch.float32),
            block[4 * length :].view(length, -1),
            length=length,
        )

    def __len__(self) -> int:
        return self._len

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} nodes, depth {int(self.depth_N.max())})"

    @property
    def arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The whole token, parent, depth, log-probability and path arrays, for operators.

        Entries from `len(tree)` on have no meaning. Aliasing: the tree's own arrays.
        """
        return self._token, self._parent, self._depth, self._log_prob, self._path

    @property
    def is_cpu(self) -> bool:
        return self._token.is_cpu

    @property
    def token_N(self) -> Tensor:
        return self._token[: self._len]

    @property
    def parent_N(self) -> Tensor:
        return self._parent[: self._len]

    @property
    def depth_N(self) -> Tensor:
        return self._depth[: self._len]

    @property
    def log_prob_N(self) -> Tensor:
        return self._log_prob[: self._len]

    @property
    def path_NA(self) -> Tensor:
        return self._path[: self._len]

    def grow(
        self,
        parents: Tensor | Sequence[int],
        tokens: Tensor | Sequence[int],
        log_probs: Tensor | Sequence[float],
    ) -> None:
        """Attach new nodes anywhere.

        Args:
            parents: (W,) ids of existing nodes, integer; a list or a tensor, like the other arguments.
            tokens: (W,) vocabulary ids; siblings must differ.
            log_probs: (W,) path log-probabilities, float, none above its parent's.

        Raises:
            ConfigError: more nodes than the capacity, lengths that differ, values of another type, or a
                parent that does not exist or ends a path of the largest depth; a tensor of parents on a
                device is not read.

        Cost: seven small operators, no sync; one copy for every list. Values are checked by `check`.
        """
        parent_W = self._as_tensor("parents", parents, torch.int64)
        tokens = self._as_tensor("tokens", tokens, torch.int32)
        log_probs = self._as_tensor("log_probs", log_probs, torch.float32)
        width = len(parents)
        first = self._len
        self._require_room(width)
        if not width == len(tokens) == len(log_probs):
            raise ConfigError(
                "lengths of parents, tokens and log_probs", (width, len(tokens), len(log_probs)), "equal"
            )
        if self.is_cpu or not isinstance(parents, Tensor):
            self._require_parents(torch.as_tensor(parents))
        new = slice(first, first + width)
        self._parent[new] = parent_W
        self._token[new] = tokens
        self._log_prob[new] = log_probs
        depth_W = self._depth[parent_W] + 1
        self._depth[new] = depth_W
        path_WA = self._path[parent_W]
        path_WA.scatter_(
            1,
            depth_W[:, None].long(),
            torch.arange(first, first + width, dtype=torch.int32, device=path_WA.device)[:, None],
        )
        self._path[new] = path_WA
        self._len += width

    def grow_chain(self, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """Attach a chain under a root without children.

        Args:
            log_probs: Log-probability of every token after the one before it.

        Cost: three copies to the device and a few small operators, no sync.
        """
        self._require_room(len(tokens))
        assert self._len == 1, "a chain goes under a bare root"
        self._len += len(tokens)
        new = slice(1, self._len)
        depth = torch.arange(self._len, dtype=torch.int32, device=self._path.device)
        self._token[new] = upload(tokens, self._token.device, dtype=torch.int32)
        self._parent[new] = depth[:-1]
        self._depth[new] = depth[1:]
        self._log_prob[new] = upload(log_probs, self._log_prob.device, dtype=torch.float64).cumsum(0)
        path = depth.expand(self._len, -1)
        self._path[: self._len, : self._len] = path.masked_fill(path > depth[:, None], -1)

    @contextmanager
    def growing(self, width: int) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor, Tensor]]:
        """For an operator that writes `width` nodes itself: the first new id and the whole `arrays`.

        The nodes are added when the block ends without an error. Raises ConfigError beyond the capacity.
        """
        self._require_room(width)
        yield self._len, *self.arrays
        self._len += width

    def _as_tensor(self, name: str, values: Tensor | Sequence[float], dtype: torch.dtype) -> Tensor:
        """Values as a tensor; of one that is given, the type alone is checked, which is no sync.

        Raises:
            ConfigError: values that are no numbers, or no integers where `dtype` is of integers.
        """
        try:
            given = values if isinstance(values, Tensor) else torch.tensor(values)
            device = self._token.device
            made = given if given is values else torch.tensor(values, dtype=dtype, device=device)
        except (OverflowError, RuntimeError, TypeError, ValueError):
            raise ConfigError(name, values, f"numbers of {dtype}") from None
        if given.ndim != 1:
            raise ConfigError(name, values, "one number for each node")
        is_whole = not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)
        if len(given) and not (is_whole or dtype.is_floating_point):
            raise ConfigError(name, str(given.dtype), "integers")
        return made

    def _require_parents(self, parents: Tensor) -> None:
        if len(parents) == 0:
            return
        unknown = parents[(parents < 0) | (parents >= self._len)]
        if len(unknown):
            raise ConfigError("parents", unknown.tolist(), f"ids of existing nodes, 0 to {self._len - 1}")
        if self.is_cpu and int(self._depth[parents].max()) >= self.max_depth:
            raise ConfigError("depth", self.max_depth + 1, f"at most {self.max_depth}, the longest path")

    def _require_room(self, width: int) -> None:
        if self._len + width > self.capacity:
            raise ConfigError("nodes", self._len + width, f"at most the tree's capacity of {self.capacity}")

    def _require_each(self, name: str, length: int) -> None:
        if length != self._len:
            raise ConfigError(f"length of {name}", length, f"the number of nodes, {self._len}")

    def ancestor_mask(self) -> Tensor:
        """(N, N) bool: whether the row's node attends to the column's node: its ancestors and itself."""
        mask_NN = torch.zeros(self._len, self._len + 1, dtype=torch.bool, device=self._path.device)
        mask_NN.scatter_(1, self.path_NA.long() % (self._len + 1), True)  # -1 falls into the extra column
        return mask_NN[:, : self._len]

    def positions(self, offset: int) -> Tensor:
        """(N,) int32 sequence positions, the root's being `offset`."""
        return self.depth_N + offset

    @property
    def leaves(self) -> Tensor:
        """Ids of the nodes without children, ascending, int64."""
        has_child = torch.zeros(self._len + 1, dtype=torch.bool, device=self._parent.device)
        has_child[self.parent_N.long()] = True  # the root's parent -1 is the extra entry
        return torch.nonzero(~has_child[: self._len])[:, 0]  # sync: their number is a shape

    def paths(self) -> list[list[int]]:
        """Node ids from the root to every leaf, in the leaves' order."""
        return [[node for node in path if node >= 0] for path in self.path_NA[self.leaves].tolist()]

    def prune(self, k: int, *, values: Tensor | Sequence[float] | None = None) -> tuple[TokenTree, Tensor]:
        """The connected subtree of at most `k` nodes, root included, with the largest sum of values.

        Args:
            k: Nodes to keep, root included.
            values: (N,) non-negative; the path probabilities when not given. Where no child has a larger
                value than its parent, the k largest are connected and taken; else a dynamic programme
                decides.

        Returns:
            The subtree and the (K,) ids that its nodes had in this tree, ascending.

        Raises:
            ConfigError: `k` below one, or values of another length.

        Cost: one sort, or O(N k^2) on the host for values that rise. Two syncs on a device.
        Source: Yggdrasil section 4.2, "Verification Width Pruning".
        """
        if k < 1:
            raise ConfigError("k", k, "at least 1: the root stays")
        if values is None:
            values = self.log_prob_N.exp()
        values = self._as_tensor("values", values, torch.float64)
        self._require_each("values", len(values))
        keep = best_subtree(self.parent_N.tolist(), values.tolist(), k)  # sync: the kept ids decide shapes
        return self.subtree(keep), torch.tensor(keep, dtype=torch.int64)

    def subtree(self, keep: Sequence[int]) -> TokenTree:
        """The nodes `keep` (ascending, connected, root first) as a new tree; this tree if all are kept.

        Cost: no sync.
        """
        if len(keep) == self._len:
            return self
        kept = upload(keep, self._path.device)
        renamed = torch.full((self._len + 1,), -1, dtype=torch.int32, device=self._path.device)
        renamed[kept] = torch.arange(len(keep), dtype=torch.int32, device=self._path.device)
        tree = TokenTree(len(keep), self.max_depth, str(self._path.device))
        tree._len = len(keep)
        tree._token.copy_(self._token[kept])
        tree._parent.copy_(renamed[self._parent[kept]])  # -1 reads the extra entry, -1
        tree._depth.copy_(self._depth[kept])
        tree._log_prob.copy_(self._log_prob[kept])
        tree._path.copy_(renamed[self._path[kept]])
        return tree

    def walk(self, next_tokens: Tensor | Sequence[int]) -> list[int]:
        """The accepted path: from the root, descend while a child has the target's token.

        Args:
            next_tokens: (N,) the target's own token after each node.

        Returns:
            Node ids, root first. The bonus token is `next_tokens[path[-1]]`.

        Raises:
            ConfigError: not one token for every node.

        Cost: O(N) on the host; on a device three syncs.
        Source: the acceptance law: the tree is deterministic, so matching the target's token is exact.
        """
        self._require_each("next_tokens", len(next_tokens))
        parents = self.parent_N.tolist()  # sync: the walk runs on the host
        tokens = self.token_N.tolist()  # sync: the walk runs on the host
        wanted = next_tokens.tolist() if isinstance(next_tokens, Tensor) else next_tokens
        return walk(parents, tokens, wanted)

    def check(self) -> None:
        """Raises ConfigError for parents, depths, paths, siblings or values that `grow` never makes."""
        parents = self.parent_N.tolist()
        tokens = self.token_N.tolist()
        log_probs = self.log_prob_N.tolist()
        for node in range(self._len):
            parent = parents[node]
            if not (parent == -1 if node == 0 else 0 <= parent < node):
                raise ConfigError(f"parent of node {node}", parent, "-1 for the root, else an earlier node")
            if node and not log_probs[node] <= log_probs[parent] + 1e-6:
                raise ConfigError(
                    f"log-probability of node {node}",
                    log_probs[node],
                    f"at most its parent's, {log_probs[parent]}",
                )
            path = [node]
            if node:
                parent_depth = int(self.depth_N[parent])
                path = [*self.path_NA[parent, : parent_depth + 1].tolist(), node]
            entries = [entry for entry in self.path_NA[node].tolist() if entry >= 0]
            if entries != path or int(self.depth_N[node]) != len(path) - 1:
                raise ConfigError(f"path of node {node}", self.path_NA[node].tolist(), f"{path}")
        if len(set(zip(parents, tokens, strict=True))) != self._len:
            raise ConfigError("siblings", tokens, "distinct tokens under one parent")

    def to_networkx(self) -> networkx.DiGraph[int]:
        """A directed graph, parent to child, with `token`, `depth` and `log_prob` on every node."""
        import networkx

        graph: networkx.DiGraph[int] = networkx.DiGraph()
        arrays_N = (self.token_N, self.parent_N, self.depth_N, self.log_prob_N)
        nodes = zip(*(array_N.tolist() for array_N in arrays_N), strict=True)
        for node, (token, parent, depth, log_prob) in enumerate(nodes):
            graph.add_node(node, token=token, depth=depth, log_prob=log_prob)
            if parent >= 0:
                graph.add_edge(parent, node)
        return graph

    def picture(
        self,
        label: Sequence[str] | None = None,
        marked: Sequence[int] = (),
        *,
        kept: Sequence[int] | None = None,
        bonus: str = "",
    ) -> Picture:
        """What `to_svg` and `to_dot` draw; takes their arguments.

        Raises:
            ConfigError: not one label for every node, or a marked or kept node that does not exist.
        """
        labels = list(map(str, self.token_N.tolist())) if label is None else list(label)
        self._require_each("label", len(labels))
        for name, nodes in (("marked", marked), ("kept", kept or ())):
            unknown = [node for node in nodes if not 0 <= node < self._len]
            if unknown:
                raise ConfigError(name, unknown, f"ids of existing nodes, 0 to {self._len - 1}")
        log_probs = self.log_prob_N.tolist()
        notes = [
            f"node {node}, token {token}, log-probability {log_prob:.2f}"
            for node, (token, log_prob) in enumerate(zip(self.token_N.tolist(), log_probs, strict=True))
        ]
        ranks = [-log_prob for log_prob in log_probs]
        pruned = () if kept is None else set(range(self._len)) - set(kept)
        parents = self.parent_N.tolist()
        if bonus and marked:
            parents.append(max(marked))
            labels.append(bonus)
            notes.append("the target's own token after the path")
            ranks.append(-math.inf)
        last = self._len if len(parents) > self._len else -1
        return Picture(parents, labels, notes, ranks, frozenset(marked), pruned, last)

    def to_svg(
        self,
        label: Sequence[str] | None = None,
        marked: Sequence[int] = (),
        *,
        kept: Sequence[int] | None = None,
        bonus: str = "",
    ) -> Svg:
        """The tree as SVG, for light and dark pages; a notebook shows it.

        Args:
            label: A text for every node; its token when not given.
            marked: Nodes to draw bright, such as an accepted path.
            kept: Nodes that the target ran; the others are drawn with dashes.
            bonus: Text of the target's own token after the last marked node.
        """
        return self.picture(label, marked, kept=kept, bonus=bonus).svg()

    def to_dot(self, label: Sequence[str] | None = None, marked: Sequence[int] = ()) -> str:
        """The tree in the language of Graphviz; arguments as in `to_svg`."""
        return self.picture(label, marked).dot()

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def render(self, label: Sequence[str] | None = None, marked: Sequence[int] = ()) -> str:
        """The tree as text, children by falling log-probability.

        Args:
            label: A text for every node; its token when not given.
            marked: Nodes to mark with a star, such as an accepted path.
        """
        graph = self.to_networkx()
        tokens = self.token_N.tolist()
        log_probs = self.log_prob_N.tolist()

        def text(node: int) -> str:
            name = str(tokens[node]) if label is None else label[node]
            return name + (f"  {log_probs[node]:.2f}" if node else "") + (" *" if node in marked else "")

        def lines(node: int, indent: str) -> list[str]:
            children = sorted(graph.successors(node), key=lambda child: (-log_probs[child], child))
            out = []
            for child in children:
                last = child == children[-1]
                out.append(f"{indent}{'└──' if last else '├──'} {text(child)}")
                out += lines(child, indent + ("    " if last else "│   "))
            return out

        return "\n".join([text(0), *lines(0, "")])


def walk(parents: Sequence[int], tokens: Sequence[int], next_tokens: Sequence[int]) -> list[int]:
    """`TokenTree.walk` over lists of the nodes' parents and tokens."""
    path = [0]
    for node in range(1, len(parents)):  # a child's id is larger than its parent's: one pass suffices
        if parents[node] == path[-1] and tokens[node] == next_tokens[path[-1]]:
            path.append(node)
    return path


def best_subtree(parents: Sequence[int], values: Sequence[float], k: int) -> list[int]:
    """Ids, ascending, of the best connected subtree of at most `k` nodes; see `TokenTree.prune`."""
    rising = any(values[node] > values[parents[node]] for node in range(1, len(parents)))
    if rising:
        return best_subtree_reference(parents, values, k)
    # among equals the parent, being earlier, comes first
    by_value = sorted(range(1, len(parents)), key=lambda node: (-values[node], node))
    return sorted([0, *by_value[: k - 1]])


def best_subtree_reference(parents: Sequence[int], values: Sequence[float], k: int) -> list[int]:
    """The dynamic programme that specifies pruning, for any tree and any non-negative values.

    Bottom-up, `best[node][size]` is the largest value of a connected subtree of exactly `size` nodes rooted
    at `node`, with its nodes. Children are merged one at a time, as in a knapsack.

    Source: Yggdrasil section 4.2: "traverses the tree in a bottom-up fashion, computing the speedup value
    for each node and its children".
    """
    best: list[dict[int, tuple[float, tuple[int, ...]]]] = [
        {0: (0.0, ()), 1: (value, (node,))} for node, value in enumerate(values)
    ]
    for node in range(len(parents) - 1, 0, -1):
        parent = parents[node]
        merged: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for size, (value, nodes) in best[parent].items():
            for extra, (extra_value, extra_nodes) in best[node].items():
                total = size + extra
                if (
                    size >= 1
                    and total <= k
                    and (total not in merged or value + extra_value > merged[total][0])
                ):
                    merged[total] = (value + extra_value, nodes + extra_nodes)
        best[parent] = merged
    size = max(best[0], key=lambda size: (best[0][size][0], size))
    return sorted(best[0][size][1])
