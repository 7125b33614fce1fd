"""Tables for a terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from yggdrasil.pair import LoadedPair
from yggdrasil.report.tables import depth_table


def row(depth: int, rarer: int, brier: float) -> dict[str, Any]:
    return {
        "depth": depth,
        "share": 0.5,
        "rarer": rarer,
        "brier": brier,
        "brier_constant": 0.25,
        "skill": 1 - brier / 0.25,
        "auc": 0.7,
        "ece": 0.01,
    }


def test_the_depth_table_counts_where_the_constant_is_beaten(tiny: LoadedPair) -> None:
    report = dict(tiny.depth.report)
    found = report["held_out"]["0.0"]
    # the second is worse than the constant, the third has too few positions to count
    depths = [row(1, 320, 0.20), row(2, 60, 0.26), row(3, 49, 0.10)]
    report["held_out"] = {"0.0": {**found, "depths": depths}}
    table = depth_table(replace(tiny, depth=replace(tiny.depth, report=report)))
    assert "a lower Brier score than the constant at 1 of 2 depths" in table
    assert "0.2000 (0.2500)   +0.200" in table


def line(tiny: LoadedPair, best: str, **ms: float) -> str:
    """The last line of a table whose only temperature has these milliseconds a token."""
    report = dict(tiny.depth.report)
    found = report["held_out"]["0.0"]
    decisions = {**found["decisions"], "best": best, "ms_per_token": {"oracle": 1.0, **ms}}
    report["held_out"] = {"0.0": {**found, "decisions": decisions}}
    return depth_table(replace(tiny, depth=replace(tiny.depth, report=report))).splitlines()[-1]


def test_the_depth_table_names_the_rule_in_use_and_whether_the_predictor_is_off(tiny: LoadedPair) -> None:
    assert line(tiny, "predicted", fixed=3.0, predicted=2.0) == "    the predicted depth is used"
    off = "    the best fixed depth is used: the predictor is off"
    assert line(tiny, "fixed", fixed=2.0, predicted=3.0) == off
    stopping = "    growth that stops is used: the predictor is off; where growth cannot stop, "
    for fixed, ahead in ((3.0, "predicted"), (2.0, "best fixed")):
        ended = line(tiny, "stopping", fixed=fixed, predicted=2.5, stopping=1.5)
        assert ended == f"{stopping}the {ahead} depth would be"
