"""Pictures that a person can read: no curve hides another, axes have decimal numbers and a source."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from yggdrasil.pair import LoadedPair
from yggdrasil.report.plots import _bands, _readable_ms, measured_on
from yggdrasil.report.tables import EXPLAINED, plan_table
from yggdrasil.step.plan import STAGES


def test_equal_curves_are_all_seen_because_each_is_thinner_than_the_one_under_it() -> None:
    axes = Figure().subplots()
    curve = ([1.0, 2.0], [3.0, 4.0])
    _bands(axes, {"W = 8": curve, "W = 4": curve, "W = 1": curve})
    widths = [line.get_linewidth() for line in axes.get_lines()]
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) == 3


@pytest.mark.parametrize(("lowest", "highest"), [(0.03, 0.9), (0.34, 99.8), (5.0, 5.5)])
def test_an_axis_of_milliseconds_has_decimal_numbers(lowest: float, highest: float) -> None:
    axes = Figure().subplots()
    _readable_ms(axes, lowest, highest)
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels
    assert all(f"{float(label):g}" == label for label in labels)
    bottom, top = axes.get_ylim()
    assert bottom < lowest < highest < top


def test_a_picture_names_pair_processor_threads_and_day(tiny: LoadedPair) -> None:
    line = measured_on(tiny)
    assert line.startswith("pair tiny, ")
    assert str(tiny.bundle.machine["cpu_flags"]).split(" (")[0] in line
    assert line.rpartition(", ")[2].count("-") == 2


def test_the_table_of_plans_explains_every_stage(tiny: LoadedPair) -> None:
    assert tuple(EXPLAINED) == STAGES
    assert all(words in plan_table(tiny) for words in EXPLAINED.values())
