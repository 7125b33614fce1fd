"""The timeline of a step: every graph, every stage of the host, and a name for all time between graphs.

```
stages  policy |  draft                                | prune |  verify         | accept | commit
graphs             [draft 4]   [draft 4]   [draft 4]           [verify 16]
host    choose shape,     grow 1      grow 2      grow 3,                 outputs,
        head                                      prune, pack             accept, commit, observe
```

    head            metadata of the head draft, which catches up with the text
    grow i          nodes of the i-th growth step: selected, attached, their metadata filled
    pack            metadata of the verified tree
    outputs         from the target's last kernel to the rows that are used
    observe         the policy's update after the step, and the token limit
    between stages  everything else, including the recording's clocks
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from yggdrasil.report.drawing import load_matplotlib, save_figure

__all__ = [
    "BETWEEN",
    "Interval",
    "StepRecord",
    "Timeline",
    "gaps",
    "host_intervals",
    "plot_timeline",
    "timeline_table",
]

BETWEEN = "between stages"
LABEL_SHARE = 0.011  # of the step, for one line of text on its side; a shorter bar has no label


class Interval(NamedTuple):
    """A stage, a graph or a gap, with its times.

    Args:
        name: For a graph, its kind and its token count.
        start_ms: Milliseconds of `time.perf_counter`.
        end_ms: Milliseconds of the same clock.
        is_graph: Whether it is a forward.
    """

    name: str
    start_ms: float
    end_ms: float
    is_graph: bool = False

    @property
    def ms(self) -> float:
        return self.end_ms - self.start_ms

    @property
    def when(self) -> tuple[float, float]:
        """Start and end, in the order of which intervals are sorted."""
        return self.start_ms, self.end_ms


@dataclass(frozen=True)
class StepRecord:
    """The times of one step.

    Args:
        shape: Shape of the drafted tree.
        end_ms: Time at which its tokens were returned.
        stages: Stages in order; none contains another.
        graphs: Graphs in order, each within a stage.
    """

    shape: str
    start_ms: float
    end_ms: float
    stages: tuple[Interval, ...]
    graphs: tuple[Interval, ...]

    @property
    def ms(self) -> float:
        return self.end_ms - self.start_ms

    def intervals(self) -> list[Interval]:
        """The whole step without gaps, in order: graphs and the host's time between them."""
        return sorted([*self.graphs, *host_intervals(self)], key=lambda each: each.when)


def host_intervals(step: StepRecord) -> list[Interval]:
    """The time outside the graphs, as named intervals that begin and end with the stages."""
    intervals = []
    for stage in step.stages:
        inside = [graph for graph in step.graphs if stage.start_ms <= graph.start_ms < stage.end_ms]
        intervals += [
            Interval(_gap_name(stage.name, index), *gap)
            for index, gap in enumerate(_outside(inside, stage.start_ms, stage.end_ms))
        ]
    *between, after = _outside(step.stages, step.start_ms, step.end_ms)
    return sorted(
        [*intervals, *(Interval(BETWEEN, *gap) for gap in between), Interval("observe", *after)],
        key=lambda each: each.when,
    )


def _outside(inside: Sequence[Interval], start_ms: float, end_ms: float) -> list[tuple[float, float]]:
    """The time from start to end that is before, between and after the intervals."""
    edges = [
        start_ms,
        *(edge for interval in inside for edge in (interval.start_ms, interval.end_ms)),
        end_ms,
    ]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _gap_name(stage: str, index: int) -> str:
    """Name of the `index`-th gap of a stage; 0 is before its first graph."""
    if stage == "policy":
        return "choose shape"
    if stage == "draft":
        return f"grow {index}" if index else "head"
    if stage == "verify":
        return "outputs" if index else "pack"
    return stage


def gaps(step: StepRecord) -> list[list[Interval]]:
    """The host's intervals, grouped by the graphs between them."""
    return [
        list(intervals)
        for is_graph, intervals in groupby(step.intervals(), key=lambda interval: interval.is_graph)
        if not is_graph
    ]


@dataclass(frozen=True)
class Timeline:
    """Steps in which the same graphs ran in the same order."""

    steps: tuple[StepRecord, ...]

    @classmethod
    def of(cls, steps: Sequence[StepRecord]) -> Timeline:
        """The most frequent kind of step; plain steps only if there is no other."""
        speculative = [step for step in steps if len(step.graphs) > 1] or steps
        kinds = [tuple(interval.name for interval in step.intervals()) for step in speculative]
        [(most, _)] = Counter(kinds).most_common(1)
        return cls(tuple(step for step, kind in zip(speculative, kinds, strict=True) if kind == most))

    @property
    def representative(self) -> StepRecord:
        """The step of median duration."""
        return sorted(self.steps, key=lambda step: step.ms)[len(self.steps) // 2]

    def intervals_ms(self) -> list[tuple[str, bool, float]]:
        """Name, whether it is a graph, and median ms of every interval; last, the sum between stages."""
        named = [
            column
            for column in zip(*(step.intervals() for step in self.steps), strict=True)
            if column[0].name != BETWEEN
        ]
        rows = [
            (column[0].name, column[0].is_graph, median(each.ms for each in column)) for column in named
        ]
        between = [
            sum(each.ms for each in host_intervals(step) if each.name == BETWEEN) for step in self.steps
        ]
        return [*rows, (BETWEEN, False, median(between))]

    @property
    def total_ms(self) -> float:
        """Median milliseconds of a step."""
        return median(step.ms for step in self.steps)

    @property
    def host_ms(self) -> float:
        """Median milliseconds of a step outside the graphs."""
        return median(sum(interval.ms for interval in host_intervals(step)) for step in self.steps)

    def graphs_ms(self, kind: str) -> float:
        """Median milliseconds of a step inside the graphs of one kind, "draft" or "verify"."""
        return median(
            sum(graph.ms for graph in step.graphs if graph.name.startswith(kind)) for step in self.steps
        )

    @property
    def growth_step_ms(self) -> float | None:
        """Median milliseconds of a growth step, selection and forward; None if no step has one."""
        growths = [
            growing.ms + graph.ms
            for step in self.steps
            for growing, graph in pairwise(step.intervals())
            if growing.name.startswith("grow") and graph.is_graph
        ]
        return median(growths) if growths else None


def timeline_table(timeline: Timeline) -> str:
    """Every interval of the step in order, then the sums of graphs, host and growth step."""
    shape = timeline.representative.shape
    lines = [
        f"{shape}: medians of {len(timeline.steps)} steps, stages one after another",
        "        ms   share  ",
    ]
    total_ms = timeline.total_ms
    host_ms = timeline.host_ms
    lines += [
        f"{ms:10.3f}  {ms / total_ms:6.1%}  {'[' + name + ']' if is_graph else name}"
        for name, is_graph, ms in timeline.intervals_ms()
    ]
    draft_ms = timeline.graphs_ms("draft")
    verify_ms = timeline.graphs_ms("verify")
    lines.append(f"graphs {draft_ms + verify_ms:.3f} ms: draft {draft_ms:.3f}, verify {verify_ms:.3f}")
    lines.append(f"host {host_ms:.3f} ms, {host_ms / total_ms:.1%} of the step's {total_ms:.3f} ms")
    if timeline.growth_step_ms is not None:
        lines.append(f"growth step {timeline.growth_step_ms:.3f} ms: selection and one draft forward")
    return "\n".join(lines)


def plot_timeline(step: StepRecord, path: Path, *, title: str = "") -> Path:
    """Plot one step: a lane for graphs, one for stages, and name and milliseconds of every gap.

    Args:
        step: A step, such as `Timeline.representative`.
        path: A PNG file to write.

    Raises:
        UsageError: matplotlib is not installed.
    """
    matplotlib = load_matplotlib()
    names = dict.fromkeys(span.name for span in (*step.graphs, *step.stages))
    colours = {name: matplotlib.colormaps["tab20"](index % 20) for index, name in enumerate(names)}
    figure = matplotlib.figure.Figure(
        figsize=(max(11, 0.45 * len(step.graphs) + 5), 4.5), layout="constrained"
    )
    axes = figure.subplots()
    for lane, spans in enumerate((step.graphs, step.stages)):
        bars = [
            axes.barh(
                lane,
                span.ms,
                left=span.start_ms - step.start_ms,
                height=0.7,
                color=colours[span.name],
                edgecolor="white",
                linewidth=0.4,
            )
            for span in spans
        ]
        for bar, span in zip(bars, spans, strict=True):
            axes.bar_label(
                bar,
                [span.name if span.ms > LABEL_SHARE * step.ms else ""],
                label_type="center",
                fontsize=6,
                rotation=90 if span.ms < 0.1 * step.ms else 0,
            )
    right_ms = -math.inf
    for gap in gaps(step):
        centre_ms = (gap[0].start_ms + gap[-1].end_ms) / 2 - step.start_ms
        length_ms = gap[-1].end_ms - gap[0].start_ms
        axes.barh(2, length_ms, left=centre_ms - length_ms / 2, height=0.3, color="grey")
        label = _gap_label(gap)
        half_ms = LABEL_SHARE * step.ms * (label.count("\n") + 1) / 2
        label_ms = max(centre_ms, right_ms + half_ms)  # right of the last label
        right_ms = label_ms + half_ms
        axes.text(label_ms, 2.25, label, ha="center", va="top", ma="right", fontsize=6, rotation=90)
    axes.set(xlim=(-0.03 * step.ms, 1.03 * step.ms), ylim=(3.6, -0.5), xlabel="ms")
    axes.set_title(title, fontsize=9)
    axes.set_yticks(range(3), ["graphs", "stages", "between\ngraphs"], fontsize=8)
    save_figure(figure, path)
    return path


def _gap_label(gap: Sequence[Interval]) -> str:
    """One line per name, with its milliseconds."""
    names = dict.fromkeys(each.name for each in gap)
    return "\n".join(f"{name} {sum(each.ms for each in gap if each.name == name):.3f}" for name in names)
