"""Tables for a terminal: the depth predictor's results, and the chosen plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from yggdrasil.pair import LoadedPair

__all__ = ["EXPLAINED", "MIN_EVENTS", "depth_table", "plan_table"]

EXPLAINED = {
    "draft": "the draft grows the tree",
    "noise": "noise of the sampled tokens, drawn ahead of time",
    "tail": "the draft runs over the leaves ahead of time",
    "prune": "the nodes with the best expected speed are kept",
    "verify": "the target runs them in one pass",
    "choose": "the target's own token after every node",
    "next_head": "the draft runs over the next roots ahead of time",
    "accept": "the path on which the tree has these tokens",
    "commit": "its KV is kept in both caches",
}
"""What the stages of a plan do, in the order of `STAGES`."""

DEPTHS_SHOWN = (1, 2, 3, 4, 6, 8, 12, 16)
MIN_EVENTS = 50  # fewer positions of the rarer outcome show little about a depth


def depth_table(pair: LoadedPair) -> str:
    """Held-out figures of the depth predictor, and whether it is used, by temperature."""
    report = pair.depth.report
    lines = [
        f"depth predictor ({pair.dataset}), on texts it was not trained on; "
        f"a decision takes {report['decision_ms'] * 1e3:.0f} us"
    ]
    for temperature, found in report["held_out"].items():
        positions = f"{found['positions']} positions of {found['texts']} texts, cross-validated"
        lines.append(
            f"  temperature {temperature}: {positions}, trees of width {report['reference_width']}"
        )
        lines.append(
            "    accepted at least   share   Brier (constant)    skill     AUC   calibration error"
        )
        lines += [_depth_line(row) for row in found["depths"] if row["depth"] in DEPTHS_SHOWN]
        lines.append(_beaten_line(found["depths"]))
        lines += [_decision_line(found["decisions"]), _used_line(found["decisions"])]
    return "\n".join(lines)


def plan_table(pair: LoadedPair) -> str:
    """The plans that greedy and sampled requests run, if any, and why."""
    lines = ["plan of an iteration, and what it gains over the step that runs without one"]
    for search in (pair.plan.greedy, pair.plan.sampled):
        lines.append(f"  temperature {search.temperature}: {search.why()}")
        predicted = [f"{timeline.plan.name} {timeline.makespan_ms:.3f} ms" for timeline in search.timelines]
        lines += [f"    predicted from the stages: {', '.join(predicted)}"] if predicted else []
    lines.append("stages")
    lines += [f"  {stage:9s}  {words}" for stage, words in EXPLAINED.items()]
    return "\n".join(lines)


def _depth_line(row: Mapping[str, Any]) -> str:
    auc = "    -" if row["auc"] is None else f"{row['auc']:.3f}"
    brier = f"{row['brier']:.4f} ({row['brier_constant']:.4f})"
    scores = f"{brier}   {row['skill']:+.3f}   {auc}   {row['ece']:.4f}"
    return f"    {row['depth']:17d}   {row['share']:.3f}   {scores}"


def _beaten_line(rows: Sequence[Mapping[str, Any]]) -> str:
    counted = [row for row in rows if row["rarer"] >= MIN_EVENTS]
    beaten = sum(row["brier"] < row["brier_constant"] for row in counted)
    return (
        f"    a lower Brier score than the constant at {beaten} of {len(counted)} depths "
        f"with at least {MIN_EVENTS} positions of either outcome"
    )


def _decision_line(found: Mapping[str, Any]) -> str:
    ms = found["ms_per_token"]
    fixed = " or ".join(map(str, sorted(set(found["fixed_depths"]))))
    stopping = (
        f"growth that stops (mean {found['mean_stopped_depth']:.1f}) {ms['stopping']:.3f}, "
        if "stopping" in ms
        else ""
    )
    return (
        f"    ms per token: best fixed depth ({fixed}) {ms['fixed']:.3f}, "
        f"predicted depth (mean {found['mean_predicted_depth']:.1f}) {ms['predicted']:.3f}, "
        f"{stopping}oracle {ms['oracle']:.3f}; "
        f"regret {found['regret_ms_fixed']:.3f} -> {found['regret_ms_predicted']:.3f}"
    )


def _used_line(found: Mapping[str, Any]) -> str:
    """Which rule `ygg compile` has chosen, and which of the others where growth cannot stop."""
    ms = found["ms_per_token"]
    match found["best"]:
        case "predicted":
            return "    the predicted depth is used"
        case "fixed":
            return "    the best fixed depth is used: the predictor is off"
    ahead = "predicted" if ms["predicted"] < ms["fixed"] else "best fixed"
    used = "    growth that stops is used: the predictor is off"
    return f"{used}; where growth cannot stop, the {ahead} depth would be"
