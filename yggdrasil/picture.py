"""A tree as a picture: SVG, and the language of Graphviz.

```
depth        0              1             2
line 0   [ root ]──┬──[ accepted ]──┬─[ bonus ]        the first child is on its parent's line
line 1             │                └─[ rejected ]
line 2             └──[ rejected ]
```

Accepted nodes are bright, rejected ones dim, pruned ones dashed. The bonus is an outline: it is no draft.
The SVG has its colours for light and dark pages with it, and needs nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple
from unicodedata import east_asian_width

__all__ = ["Picture", "Svg"]

CHAR_WIDTH = 7.3  # of the font below, at 12 pixels
NODE_HEIGHT = 22
LINE_HEIGHT = 30
GAP = 26  # between the columns
MARGIN = 8
PADDING = 8  # of a text in its node

STYLE = """
.ygg-tree{font:12px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace}
.ygg-tree rect{fill:#f3f4f6;stroke:#d1d5db}
.ygg-tree text{fill:#6b7280}
.ygg-tree path{fill:none;stroke:#d1d5db;stroke-width:1.5}
.ygg-tree .pruned rect{fill:none;stroke-dasharray:3 3}
.ygg-tree path.pruned{stroke-dasharray:3 3}
.ygg-tree .accepted rect{fill:#166534;stroke:#166534}
.ygg-tree .accepted text{fill:#fff}
.ygg-tree path.accepted{stroke:#16a34a;stroke-width:2.5}
.ygg-tree .bonus rect{fill:none;stroke:#166534;stroke-width:1.5}
.ygg-tree .bonus text{fill:#166534}
.ygg-tree path.bonus{stroke:#16a34a;stroke-width:2.5}
@media (prefers-color-scheme:dark){
.ygg-tree rect{fill:#1f2937;stroke:#374151}
.ygg-tree text{fill:#9ca3af}
.ygg-tree path{stroke:#374151}
.ygg-tree .accepted rect{fill:#4ade80;stroke:#4ade80}
.ygg-tree .accepted text{fill:#052e16}
.ygg-tree path.accepted{stroke:#4ade80}
.ygg-tree .bonus rect,.ygg-tree path.bonus{stroke:#4ade80}
.ygg-tree .bonus text{fill:#4ade80}
}
""".replace("\n", "")


class Svg(str):
    """The text of an SVG file, which a notebook shows as the picture."""

    def _repr_svg_(self) -> str:
        return str(self)


class _Box(NamedTuple):
    """Where a node is, in pixels."""

    left: float
    centre: float
    width: float

    @property
    def right(self) -> float:
        return self.left + self.width


@dataclass(frozen=True)
class Picture:
    """What to draw of a tree, by node.

    Args:
        parents: Nodes, -1 for the root; a parent comes before its children.
        labels: Texts in the nodes.
        notes: Texts that appear over the nodes.
        ranks: Order of siblings, the smallest first.
        accepted: Nodes of the accepted path.
        pruned: Nodes that the target did not run.
        bonus: The node that is no draft: the target's own token after the accepted path. -1 for none.
    """

    parents: Sequence[int]
    labels: Sequence[str]
    notes: Sequence[str]
    ranks: Sequence[float]
    accepted: Collection[int] = ()
    pruned: Collection[int] = ()
    bonus: int = -1

    def svg(self) -> Svg:
        """The picture, with the root at the left."""
        boxes = self._boxes()
        edges = [self._edge(node, boxes) for node, parent in enumerate(self.parents) if parent >= 0]
        edges.sort(key=lambda edge: "accepted" in edge or "bonus" in edge)  # the path lies above the others
        drawn = [self._node(node, box) for node, box in enumerate(boxes)]
        right = max(box.right for box in boxes)
        bottom = max(box.centre for box in boxes) + NODE_HEIGHT / 2
        size = f"{right + MARGIN:.0f}", f"{bottom + MARGIN:.0f}"
        return Svg(
            f'<svg xmlns="http://www.w3.org/2000/svg" class="ygg-tree" role="img" '
            f'aria-label="{escape(self.describe())}" width="{size[0]}" height="{size[1]}" '
            f'viewBox="0 0 {size[0]} {size[1]}"><style>{STYLE}</style>{"".join(edges + drawn)}</svg>'
        )

    def dot(self) -> str:
        """The tree in the language of Graphviz: `dot -Tpng`."""
        looks = {
            "accepted": 'style=filled fillcolor="#166534" fontcolor=white',
            "pruned": "style=dashed fontcolor=gray40",
            "rejected": "fontcolor=gray40",
            "bonus": 'color="#166534" fontcolor="#166534"',
        }
        nodes = [
            f'  {node} [label="{_quoted(label)}" {looks[self.kind(node)]}]'
            for node, label in enumerate(self.labels)
        ]
        edges = [f"  {parent} -> {node}" for node, parent in enumerate(self.parents) if parent >= 0]
        return "\n".join(["digraph tree {", "  rankdir=LR", "  node [shape=box]", *nodes, *edges, "}"])

    def kind(self, node: int) -> str:
        """What became of a node: "accepted", "rejected" or "pruned"; or "bonus"."""
        if node == self.bonus:
            return "bonus"
        if node in self.accepted:
            return "accepted"
        return "pruned" if node in self.pruned else "rejected"

    def describe(self) -> str:
        """The accepted path in words, for those who hear the picture."""
        path = " ".join(self.labels[node] for node in sorted(self.accepted))
        return f"a tree of {len(self.parents)} nodes; accepted: {path or 'none'}"

    def lines(self) -> list[int]:
        """The line of every node: leaves take one after another, and a parent that of its first child."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent].append(node)
        lines = [0] * len(self.parents)
        used = 0
        waiting = [0]
        while waiting:
            node = waiting.pop()
            lines[node] = used
            ordered = sorted(children[node], key=lambda child: (self.ranks[child], child))
            waiting += reversed(ordered)
            used += not ordered
        return lines

    def _depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    def _boxes(self) -> list[_Box]:
        depths = self._depths()
        widths = [_text_width(label) + 2 * PADDING for label in self.labels]
        columns = [float(MARGIN)]
        for depth in range(max(depths)):
            widest = max(width for width, at in zip(widths, depths, strict=True) if at == depth)
            columns.append(columns[-1] + widest + GAP)
        return [
            _Box(columns[depth], MARGIN + NODE_HEIGHT / 2 + LINE_HEIGHT * line, width)
            for depth, line, width in zip(depths, self.lines(), widths, strict=True)
        ]

    def _edge(self, node: int, boxes: Sequence[_Box]) -> str:
        begin = boxes[self.parents[node]]
        end = boxes[node]
        bend = end.left - GAP / 2
        curve = f"M{begin.right:.0f} {begin.centre:.0f}H{bend:.0f}V{end.centre:.0f}H{end.left:.0f}"
        return f'<path class="{self.kind(node)}" d="{curve}"/>'

    def _node(self, node: int, box: _Box) -> str:
        corner = f'x="{box.left:.0f}" y="{box.centre - NODE_HEIGHT / 2:.0f}"'
        frame = f'<rect {corner} width="{box.width:.0f}" height="{NODE_HEIGHT}" rx="5"/>'
        text = _text(self.labels[node], box.left + PADDING, box.centre)
        return _group(self.kind(node), self.notes[node], frame + text)


def _group(kind: str, note: str, content: str) -> str:
    return f'<g class="{kind}"><title>{escape(note)}</title>{content}</g>'


def _text(text: str, left: float, centre: float) -> str:
    """A text in SVG, where several blanks in a row would be one."""
    shown = escape(text).replace(" ", "\u00a0")
    return f'<text x="{left:.0f}" y="{centre + 4:.0f}">{shown}</text>'


def _text_width(text: str) -> float:
    return CHAR_WIDTH * sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
