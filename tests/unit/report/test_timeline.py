"""Timelines of hand-made steps; tests/cli has those of a compiled pair."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from yggdrasil.errors import UsageError
from yggdrasil.report.timeline import (
    BETWEEN,
    Interval,
    StepRecord,
    Timeline,
    gaps,
    host_intervals,
    plot_timeline,
    timeline_table,
)


def graph(name: str, start_ms: float, end_ms: float) -> Interval:
    return Interval(name, start_ms, end_ms, True)


def speculative(verify_ms: float = 2.0) -> StepRecord:
    """A head draft, one growth forward and a verification that takes `verify_ms`; all else takes a
    millisecond, the last selection three.
    """
    end = 14 + verify_ms
    return StepRecord(
        "W=4 D=2 K=auto",
        0,
        end + 4,
        (
            Interval("policy", 1, 2),
            Interval("draft", 3, 10),
            Interval("prune", 11, 12),
            Interval("verify", 13, end + 1),
            Interval("accept", end + 1, end + 2),
            Interval("commit", end + 2, end + 3),
        ),
        (graph("draft 2", 4, 5), graph("draft 4", 6, 7), graph("verify 8", 14, end)),
    )


PLAIN = StepRecord(
    "plain",
    0,
    20,
    (
        Interval("policy", 0, 1),
        Interval("draft", 1, 2),
        Interval("prune", 2, 3),
        Interval("verify", 3, 18),
        Interval("accept", 18, 19),
        Interval("commit", 19, 20),
    ),
    (graph("verify 2", 4, 17),),
)


def names(step: StepRecord) -> list[str]:
    return [interval.name for interval in step.intervals() if interval.name != BETWEEN]


@pytest.mark.parametrize("step", (speculative(), PLAIN), ids=str)
def test_every_moment_of_a_step_has_one_name(step: StepRecord) -> None:
    intervals = step.intervals()
    assert (intervals[0].start_ms, intervals[-1].end_ms) == (step.start_ms, step.end_ms)
    assert all(before.end_ms == after.start_ms for before, after in pairwise(intervals))
    assert sum(interval.ms for interval in intervals) == step.ms


def test_gaps_are_named_by_their_stage_and_by_the_graphs_around_them() -> None:
    drafting = ["choose shape", "head", "draft 2", "grow 1", "draft 4", "grow 2"]
    assert names(speculative()) == [
        *drafting,
        "prune",
        "pack",
        "verify 8",
        "outputs",
        "accept",
        "commit",
        "observe",
    ]
    assert names(PLAIN) == [
        "choose shape",
        "head",
        "prune",
        "pack",
        "verify 2",
        "outputs",
        "accept",
        "commit",
        "observe",
    ]


def test_intervals_last_from_one_event_to_the_next() -> None:
    ms = {interval.name: interval.ms for interval in host_intervals(speculative())}
    expected = {"head": 1, "grow 1": 1, "grow 2": 3, "pack": 1, "outputs": 1, "observe": 1}
    assert {name: ms[name] for name in expected} == expected
    assert sum(interval.ms for interval in host_intervals(speculative()) if interval.name == BETWEEN) == 4


def test_a_gap_is_everything_between_two_graphs() -> None:
    found = [[interval.name for interval in gap if interval.ms] for gap in gaps(speculative())]
    after = ["outputs", "accept", "commit", "observe"]
    assert found == [
        [BETWEEN, "choose shape", BETWEEN, "head"],
        ["grow 1"],
        ["grow 2", BETWEEN, "prune", BETWEEN, "pack"],
        after,
    ]


def test_a_timeline_keeps_the_most_frequent_kind_and_plain_steps_only_without_others() -> None:
    rare = replace(
        speculative(), graphs=(graph("draft 2", 4, 5), graph("draft 4", 6, 7), graph("verify 16", 14, 16))
    )
    assert Timeline.of([PLAIN, PLAIN, PLAIN, rare, speculative(1), speculative(2)]).steps == (
        speculative(1),
        speculative(2),
    )
    assert Timeline.of([PLAIN, PLAIN]).steps == (PLAIN, PLAIN)


def test_figures_are_medians_over_the_steps() -> None:
    timeline = Timeline((speculative(9), speculative(2), speculative(4)))
    assert timeline.representative == speculative(4)
    assert (
        timeline.total_ms,
        timeline.host_ms,
        timeline.graphs_ms("draft"),
        timeline.graphs_ms("verify"),
    ) == (22, 16, 2, 4)
    rows = timeline.intervals_ms()
    assert rows[0] == ("choose shape", False, 1)
    assert ("verify 8", True, 4) in rows
    assert rows[-1] == (BETWEEN, False, 4)
    assert [name for name, _, _ in rows].count(BETWEEN) == 1
    assert sum(ms for _, _, ms in rows) == timeline.total_ms


def test_a_growth_step_is_a_selection_and_the_forward_after_it() -> None:
    slow = replace(
        speculative(), graphs=(graph("draft 2", 4, 5), graph("draft 4", 7, 9.5), graph("verify 8", 14, 16))
    )
    assert Timeline((speculative(),)).growth_step_ms == 2  # the second selection has no forward
    assert Timeline((speculative(), slow)).growth_step_ms == (2 + 4.5) / 2
    assert Timeline((PLAIN,)).growth_step_ms is None


def test_the_table_has_the_sums() -> None:
    table = timeline_table(Timeline((speculative(),)))
    assert "graphs 4.000 ms: draft 2.000, verify 2.000" in table
    assert "host 16.000 ms, 80.0% of the step's 20.000 ms" in table
    assert "growth step 2.000 ms" in table
    assert "growth step" not in timeline_table(Timeline((PLAIN,)))


def test_without_matplotlib_a_plot_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    step = StepRecord("W2 D1", 0.0, 1.0, (), ())
    with pytest.raises(
        UsageError, match=r"matplotlib is not installed, .*pip install 'yggdrasil-decoding\[plots\]'"
    ):
        plot_timeline(step, tmp_path / "step.png")
