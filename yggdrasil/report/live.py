"""One generation on a terminal: the text, and next to it the tree of every step as it grows.

A step takes milliseconds, so it is drawn after it has run, in slow motion: one frame for each depth of the
tree, then one with the target's decision. The drawing stops the run between steps, and the run's clocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from yggdrasil.report.run import Run
from yggdrasil.state import StepResult
from yggdrasil.text.tokenizer import Tokenizer
from yggdrasil.tree import TokenTree

__all__ = ["column_width", "draw_live", "last_lines", "side_by_side", "step_frames"]

ACCEPTED = "bold green"
OWN = "bold cyan"  # the target's own token after the accepted ones
OPEN = "default"  # not decided yet
PROMPT = "dim"
REJECTED = "dim"
GROWTH_S = 0.06  # a frame with one more depth
DECISION_S = 0.4  # the frame with the accepted path
GUTTER = 3  # blanks between two columns


def draw_live(run: Run, console: Console, prompt: str) -> None:
    """Run to the end and draw every step; the drawing is gone after it."""
    tokenizer = run.pair.tokenizer
    with Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop") as live:
        for chunk, result in run.steps():
            if result is None:
                continue
            before = run.text[: len(run.text) - len(chunk)]
            frames = list(step_frames(result, tokenizer))
            for frame in frames:
                is_last = frame is frames[-1]
                text = Text.assemble((prompt, PROMPT), before, (chunk if is_last else "", ACCEPTED))
                left = last_lines(text, console)
                live.update(side_by_side(console, left, frame), refresh=True)
                time.sleep(DECISION_S if is_last else GROWTH_S)


def step_frames(result: StepResult, tokenizer: Tokenizer) -> Iterator[RenderableType]:
    """A verified tree as it grows, a depth at a time; then its accepted path and the target's token."""
    tree = result.tree
    depths = tree.depth_N.tolist()
    for depth in range(1, max(depths) + 1):
        grown = [node for node in range(len(depths)) if depths[node] <= depth]
        yield Group(Text(str(result.shape), PROMPT), _drawn(tree, tokenizer, dict.fromkeys(grown, OPEN))[0])
    styles = {node: ACCEPTED if node in result.path else REJECTED for node in range(len(depths))}
    decided = _drawn(tree, tokenizer, styles)
    if len(result.tokens) == len(result.path):
        decided[result.path[-1]].add(_label(tokenizer, result.tokens[-1], OWN))
    counts = f"{result.verified} verified, {result.accepted} accepted, {result.ms:.1f} ms"
    yield Group(Text(f"{result.shape}: {counts}", PROMPT), decided[0])


def _drawn(tree: TokenTree, tokenizer: Tokenizer, styles: Mapping[int, str]) -> dict[int, Tree]:
    """The nodes that have a style, by id; the root draws all."""
    tokens = tree.token_N.tolist()
    parents = tree.parent_N.tolist()
    # parents come before children, and among siblings the likelier first
    ranks = list(zip(tree.depth_N.tolist(), tree.log_prob_N.neg().tolist(), strict=True))
    drawn: dict[int, Tree] = {}
    for node in sorted(styles, key=lambda node: ranks[node]):
        label = _label(tokenizer, tokens[node], styles[node])
        drawn[node] = drawn[parents[node]].add(label) if drawn else Tree(label, guide_style=REJECTED)
    return drawn


def _label(tokenizer: Tokenizer, token: int, style: str) -> Text:
    return Text(tokenizer.token_text(token), style=style, no_wrap=True, overflow="ellipsis")


def column_width(console: Console) -> int:
    """Characters of one of two columns."""
    return max(1, (console.width - GUTTER) // 2)


def last_lines(text: Text, console: Console) -> Text:
    """The end of a text that fits into one of two columns of the screen."""
    return Text("\n").join(text.wrap(console, column_width(console))[-max(1, console.height - 3) :])


def side_by_side(console: Console, left: RenderableType, right: RenderableType) -> Table:
    """Two columns of equal width."""
    table = Table.grid(expand=True, padding=(0, GUTTER, 0, 0))
    table.add_column(width=column_width(console), no_wrap=True)
    table.add_column(ratio=1, no_wrap=True)
    table.add_row(left, right)
    return table
