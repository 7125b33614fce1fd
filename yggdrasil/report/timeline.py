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
    between stages  everything else, including the clocks of this recording
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.engine import Engine
from yggdrasil.errors import ConfigError
from yggdrasil.models.protocol import TokenModel
from yggdrasil.pair import LoadedPair
from yggdrasil.report.drawing import load_matplotlib, save_figure
from yggdrasil.trace import Trace

__all__ = [
    "BETWEEN",
    "Forwards",
    "Interval",
    "RecordedModel",
    "Recorder",
    "StepRecord",
    "Timeline",
    "gaps",
    "host_intervals",
    "plot_timeline",
    "record_timeline",
    "timeline_table",
]

BETWEEN = "between stages"
GREEDY = SamplingConfig()
NUM_STEPS = 24
MOST_RUNS = 6
LABEL_SHARE = 0.011  # of the step, for one line of text on its side; a shorter bar has no label
WARM_UP = 2  # steps of every run that are dropped: the first contains the prompt's forwards


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
        return sorted([*self.graphs, *host_intervals(self)], key=_when)


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
        [*intervals, *(Interval(BETWEEN, *gap) for gap in between), Interval("observe", *after)], key=_when
    )


def _when(interval: Interval) -> tuple[float, float]:
    return interval.start_ms, interval.end_ms


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


class Forwards(NamedTuple):
    """Forwards of one graph, stored as they ran; the work of naming them is left for later.

    Args:
        kind: Kind of the graph, "draft" or "verify".
        num_tokens: Tokens of each forward.
        times_ms: Start and end of each forward.
        sizes: Sizes of the menu, if `num_tokens` may have been padded to one of them.
    """

    kind: str
    num_tokens: int
    times_ms: Sequence[float]
    sizes: Sequence[int] = ()

    def intervals(self) -> list[Interval]:
        """One interval per forward, named by kind and tokens of the graph."""
        size = next((size for size in self.sizes if size >= self.num_tokens), self.num_tokens)
        return [
            Interval(f"{self.kind} {size}", *times, True)
            for times in zip(self.times_ms[::2], self.times_ms[1::2], strict=True)
        ]


class Recorder(Trace):
    """A trace that keeps the times of stages and graphs until `take`."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: list[tuple[Sequence[str], Sequence[float]]] = []
        self.graphs: list[Forwards] = []

    def note(self, names: Sequence[str], marks_ms: Sequence[float]) -> None:
        """Keep the times of stages in a row."""
        self.stages.append((names, marks_ms))

    def take(self, shape: str, start_ms: float, end_ms: float) -> StepRecord:
        """The step since the last call."""
        stages = (
            Interval(name, *marks)
            for names, marks_ms in self.stages
            for name, marks in zip(names, pairwise(marks_ms), strict=True)
        )
        graphs = (interval for forwards in self.graphs for interval in forwards.intervals())
        step = StepRecord(shape, start_ms, end_ms, tuple(stages), tuple(sorted(graphs, key=_when)))
        self.stages.clear()
        self.graphs.clear()
        return step


class RecordedModel:
    """A model that records when its graphs run; see models/protocol.py.

    Args:
        kind: Kind of its graphs, for their names.
        notes: List that receives the forwards.

    Cost: a microsecond per forward; on CUDA also a sync, since a forward only launches its kernels.
    """

    def __init__(self, model: TokenModel, kind: str, notes: list[Forwards]) -> None:
        self.cache = model.cache
        self.device = model.device
        self.max_depth = model.max_depth
        self.sizes = model.sizes
        self.prefill_chunk = model.prefill_chunk
        self.widest = model.widest
        self.num_candidates = model.num_candidates
        self.vocab = model.vocab
        self.graph_ms = 0.0
        self._model = model
        self._kind = kind
        self._notes = notes

    def meta(self, num_tokens: int) -> Tensor:
        return self._model.meta(num_tokens)

    def forward(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        start = time.perf_counter()
        outputs = self._model.forward(meta_NM)
        if self.device == "cuda":
            torch.cuda.synchronize()  # sync: a graph has run when its result has arrived
        end = time.perf_counter()
        self.graph_ms += (end - start) * 1e3
        self._notes.append(Forwards(self._kind, len(meta_NM), (start * 1e3, end * 1e3)))
        return outputs

    def graph_object(self, meta_NM: Tensor) -> Any | None:
        return self._model.graph_object(meta_NM)

    def record_forward_(self, num_tokens: int, times_ms: Sequence[float]) -> None:
        self.graph_ms += sum(times_ms[1::2]) - sum(times_ms[::2])
        self._notes.append(Forwards(self._kind, num_tokens, times_ms, self.sizes))


def record_timeline(
    pair: LoadedPair,
    prompt: Sequence[int],
    *,
    num_steps: int = NUM_STEPS,
    sampling: SamplingConfig = GREEDY,
) -> Timeline:
    """Decode a prompt with the default policy, without a plan, until `num_steps` steps were alike.

    There is no guard: on a busy machine it stops speculation, and a plain step has no draft to show.

    Args:
        pair: Its caches are overwritten.
        prompt: At least one token; decoded up to `MOST_RUNS` times if one text has too few steps of a kind.
        num_steps: Steps of one kind to find; fewer are returned if there are no more.

    Raises:
        ConfigError: the context has no room for a step after the warm-up.
    """
    steps: list[StepRecord] = []
    for _ in range(MOST_RUNS):
        steps += _run(pair, prompt, WARM_UP + num_steps, sampling)[WARM_UP:]
        if not steps:
            raise ConfigError(
                "prompt",
                f"{len(prompt)} tokens",
                f"at most {pair.bundle.max_context // 2}, to have steps after it",
            )
        found = Timeline.of(steps)
        if len(found.steps) >= num_steps:
            break
    return found


def _run(
    pair: LoadedPair, prompt: Sequence[int], num_steps: int, sampling: SamplingConfig
) -> list[StepRecord]:
    recorder = Recorder()
    steps = []
    target = RecordedModel(pair.engine.target, "verify", recorder.graphs)
    draft = RecordedModel(pair.engine.draft, "draft", recorder.graphs)
    engine = Engine(target, draft, max_context=pair.bundle.max_context, trace=recorder)
    start = time.perf_counter()
    policy = pair.policy(temperature=sampling.temperature, guard=False)
    config = GenerateConfig(ignore_eos=True, sampling=sampling)
    for result in islice(engine.generate(prompt, policy, config), num_steps):
        end = time.perf_counter()
        steps.append(recorder.take(str(result.shape), start * 1e3, end * 1e3))
        start = time.perf_counter()
    return steps


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
