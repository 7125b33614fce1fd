"""What does maximising the speedup of Eq. 3 bring over maximising AAL?

Paper: Fig. 14 (8 %). The same menu of shapes, greedy, interleaved, on every kind of text:

- speedup: W, D and K by Eq. 3, without depth predictor and guard, so that nothing but the objective
  differs;
- AAL: the W, D and K with the largest AAL on calibration text, whatever they cost;
- AAL, cheap K: the same among the K whose verification takes at most 1.2 times a plain pass, which is how
  earlier systems use AAL.

Refuted where a ratio of speedup to AAL is below 1 with its whole interval. Against the cheap K it shows how
much of the gain a threshold gets."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from bench.lib.arms import (
    PLAIN_ARM,
    arm_summary,
    fixed_policy,
    geometric_means,
    plain_arm,
    policy_arm,
    ratios_to,
)
from bench.lib.claim import Claim, Log, bars, prompts_option, tokens_option
from bench.lib.harness import interleave
from bench.lib.subject import Subject, subject
from bench.lib.workloads import WORKLOADS, Workload, beginnings
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.baselines import equal_growth
from yggdrasil.state import Shape

SPEEDUP = "speedup"
AAL = "AAL"
CHEAP_AAL = "AAL, cheap K"
CHEAP = 1.2


def most_accepting(pair: LoadedPair, verify_widths: Sequence[int]) -> Shape:
    """The shape of the menu with the largest AAL on calibration text; of equals the smaller."""
    acceptance = pair.acceptance.nearest(0.0)
    shapes = [
        equal_growth(width, depth, verify)
        for width in pair.bundle.config.widths
        for depth in range(1, acceptance.max_depth + 1)
        for verify in verify_widths
    ]
    return max(
        shapes, key=lambda shape: acceptance.expected_emitted(shape.width, shape.depth, shape.verify or 1)
    )


def cheap_widths(pair: LoadedPair, context_len: int) -> list[int]:
    """The K that verification hardly feels, the smallest at least."""
    curve = pair.latency.verify
    widths = pair.bundle.config.verify_widths
    return [
        width for width in widths if curve.at(width, context_len) <= CHEAP * curve.at(1, context_len)
    ] or [widths[0]]


def measure_workload(
    under_test: Subject, workload: Workload, options: argparse.Namespace, log: Log
) -> dict[str, Any]:
    """All objectives on one kind of text."""
    pair = under_test.pair(workload)
    shapes = {
        AAL: most_accepting(pair, pair.bundle.config.verify_widths),
        CHEAP_AAL: most_accepting(pair, cheap_widths(pair, options.tokens)),
    }
    log(f"{workload}: " + ", ".join(f"{name} {shape}" for name, shape in shapes.items()))
    arms = [
        plain_arm(pair, options.tokens),
        policy_arm(SPEEDUP, pair, pair.policy(depth="fixed", guard=False), options.tokens),
    ]
    arms += [
        policy_arm(name, pair, fixed_policy(pair, shape), options.tokens) for name, shape in shapes.items()
    ]
    rounds = interleave(
        arms, beginnings(workload.test_texts, pair, options.prompts), reference=PLAIN_ARM, tick=log
    )
    return {
        "arms": {name: arm_summary(rounds, name) for name in rounds.by_arm},
        "speedup_over": ratios_to(rounds, SPEEDUP),
    }


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Every kind of text."""
    under_test = subject(options)
    log(under_test.target.statement)
    workloads = {
        name: measure_workload(under_test, workload, options, log) for name, workload in WORKLOADS.items()
    }
    over = geometric_means([each["speedup_over"] for each in workloads.values()])
    return {
        "target": under_test.target.to_json(),
        "workloads": workloads,
        "geometric_mean_speedup_over": over,
    }


def table(result: Mapping[str, Any]) -> str:
    """Milliseconds per token, AAL, ratio."""
    lines = []
    for workload, found in result["workloads"].items():
        lines.append(f"{workload:<16} {'ms/token':>9} {'AAL':>6} {'Eq. 3 is faster by':>19}")
        for name, arm in found["arms"].items():
            over = found["speedup_over"].get(name)
            figures = f"  {name:<14} {arm['tpot_after_first_ms']['median']:>9.2f} {arm['aal']:>6.2f}"
            lines.append(
                figures
                + (f" {over['median']:>8.2f} {over['ci95']}" if over else "")
                + f"  {next(iter(arm['shapes']))}"
            )
    return "\n".join([*lines, f"geometric mean, Eq. 3 over: {result['geometric_mean_speedup_over']}"])


def draw(figure: Figure, result: Mapping[str, Any]) -> None:
    """Milliseconds per token on the left, AAL on the right."""
    workloads = result["workloads"]
    for axes, (ylabel, value) in zip(
        figure.subplots(1, 2),
        (
            ("ms per token", lambda arm: arm["tpot_after_first_ms"]["median"]),
            ("AAL", lambda arm: arm["aal"]),
        ),
        strict=True,
    ):
        bars(
            axes,
            list(workloads),
            {
                name: [value(found["arms"][name]) for found in workloads.values()]
                for name in (SPEEDUP, AAL, CHEAP_AAL)
            },
            ylabel=ylabel,
        )
        axes.set_title("objective: speedup or AAL (paper: Fig. 14)")


CLAIM = Claim(
    name="objective",
    doc=__doc__,
    options=(prompts_option(10), tokens_option(64)),
    measure=measure,
    table=table,
    draw=draw,
)

if __name__ == "__main__":
    CLAIM.main()
