"""Gantt charts of simulated iterations (Yggdrasil Fig. 9)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from yggdrasil.errors import ConfigError
from yggdrasil.report.drawing import load_matplotlib, save_figure
from yggdrasil.report.tables import EXPLAINED
from yggdrasil.schedule.search import Timeline
from yggdrasil.step.plan import STAGES

__all__ = ["plot_plans"]

_LANES = ("host", "main", "side")
_LABEL_SHARE = 0.055  # share of the axis; a shorter bar has no room for its name
_DARK = 0.5  # a bar of less brightness has white words


def plot_plans(charts: Mapping[str, Timeline], path: Path, *, title: str = "") -> Path:
    """Draw one chart per timeline, one below another, on one millisecond axis.

    Args:
        path: A PNG file to write.

    Raises:
        UsageError: matplotlib is not installed.
        ConfigError: there is nothing to draw.
    """
    if not charts:
        raise ConfigError("charts", 0, "at least one")
    matplotlib = load_matplotlib()
    palette = matplotlib.colormaps["tab20"]
    colours = {stage: palette(index % 20) for index, stage in enumerate(STAGES)}
    figure = matplotlib.figure.Figure(figsize=(11, 1.6 + 1.3 * len(charts)), layout="constrained")
    longest = max(timeline.makespan_ms for timeline in charts.values())
    rows = figure.subplots(len(charts), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, timeline) in zip(rows, charts.items(), strict=True):
        _draw(axes, timeline, colours, longest)
        axes.set_title(f"{name}: {timeline.makespan_ms:.2f} ms", fontsize=9, loc="left")
    axes.set(
        xlim=(0, 1.01 * longest), xlabel="ms; the dotted line is the end, with the time between stages"
    )
    shown = {span.stage for timeline in charts.values() for span in timeline.spans}
    handles = [
        matplotlib.patches.Patch(color=colours[stage], label=f"{stage}: {EXPLAINED[stage]}")
        for stage in STAGES
        if stage in shown
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)
    return path


def _draw(axes: Any, timeline: Timeline, colours: dict[str, Any], longest_ms: float) -> None:
    lanes = [lane for lane in _LANES if any(span.lane == lane for span in timeline.spans)]
    for span in timeline.spans:
        lane = lanes.index(span.lane)
        length_ms = span.end_ms - span.start_ms
        axes.barh(
            lane,
            length_ms,
            left=span.start_ms,
            height=0.7,
            color=colours[span.stage],
            edgecolor="white",
            linewidth=0.4,
        )
        if length_ms > _LABEL_SHARE * longest_ms:
            red, green, blue, _ = colours[span.stage]
            is_dark = 0.3 * red + 0.6 * green + 0.1 * blue < _DARK
            axes.text(
                span.start_ms + length_ms / 2,
                lane,
                f"{span.stage}\n{length_ms:.2f}",
                ha="center",
                va="center",
                fontsize=7,
                color="white" if is_dark else "black",
            )
    axes.set_yticks(range(len(lanes)), lanes, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(timeline.makespan_ms, color="grey", linewidth=0.8, linestyle=":")
