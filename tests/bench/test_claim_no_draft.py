"""The claim about a target without a draft model: its goals, and a rehearsal on a small target."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from conftest import SMALLEST

from bench import claim_no_draft
from bench.claim_no_draft import ALL_LAYERS, CHOSEN, REPEATS, goals_of, measure_target, table
from bench.lib.arms import PLAIN_ARM
from bench.lib.headlines import CLAIMS
from bench.lib.pair import bench_target


def found(*gains: float) -> dict[str, Any]:
    """A target for every gain."""
    over = [{CHOSEN: {"median": gain, "ci95": [gain - 0.1, gain + 0.1]}} for gain in gains]
    return {str(place): {"temperatures": {"0": {"over_plain": each}}} for place, each in enumerate(over)}


def test_every_target_has_to_reach_the_goal() -> None:
    goals = goals_of(found(1.7, 1.69))
    assert [goal["reached"] for goal in goals] == [True, False]
    headline = CLAIMS["no_draft"].read({"targets": found(1.7, 1.69), "goals": goals})
    assert (headline.value, headline.held, headline.missed) == (1.69, False, (1, 2))


def test_a_rehearsal_compares_all_arms_with_plain_decoding(
    llama_folders: tuple[str, str], ygg_home: Path, kernels: None
) -> None:
    target = bench_target(Path(llama_folders[0]), 0)
    options = Namespace(prompts=1, tokens=4, remeasure=False)
    each = measure_target(target, "tiny", options, SMALLEST, lambda line: None)
    for temperature in ("0", "0.8"):
        arms = each["temperatures"][temperature]
        assert set(arms["arms"]) == {PLAIN_ARM, CHOSEN, ALL_LAYERS, REPEATS}
        assert set(arms["over_plain"]) == {CHOSEN, ALL_LAYERS, REPEATS}
    result = {"targets": {"small": each}, "goals": goals_of({"small": each})}
    for line in ("draft made from the target", claim_no_draft.REPEATS):
        assert line in table(result)
