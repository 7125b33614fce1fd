"""Where should a tree's depth come from: the calibration text, the context before drafting, or the tree
while it grows?

Not a figure of the paper, which predicts D: on a GPU nobody can wait for the draft. Greedy, unguarded,
interleaved, on every kind of text, for a target of real size and for the bundled one, whose verification
costs little more than its draft:

- fixed: W and D by Eq. 3 on calibration text;
- predicted: W and D by Eq. 3 under the depth predictor;
- stopping: W by Eq. 3, growth that stops where a step gains less than its time.

Refuted where the rule that `ygg compile` chose on texts held out from the predictor is slower than one of
the others with the whole interval of the ratio."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, get_args

from matplotlib.figure import Figure

from bench.lib.arms import PLAIN_ARM, arm_summary, plain_arm, policy_arm, ratios_to
from bench.lib.claim import Claim, Log, bars, prompts_option, tokens_option
from bench.lib.harness import interleave
from bench.lib.subject import subject
from bench.lib.workloads import WORKLOADS, Workload, beginnings
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.shape import DepthRule

RULES: tuple[DepthRule, ...] = get_args(DepthRule)
SIZES = ("real size", "bundled size")


def measure_pair(
    pair: LoadedPair, workload: Workload, options: argparse.Namespace, log: Log
) -> dict[str, Any]:
    """The three rules and plain decoding on one kind of text."""
    arms = [
        plain_arm(pair, options.tokens),
        *(policy_arm(rule, pair, pair.policy(depth=rule, guard=False), options.tokens) for rule in RULES),
    ]
    rounds = interleave(
        arms, beginnings(workload.test_texts, pair, options.prompts), reference=PLAIN_ARM, tick=log
    )
    chosen = pair.depth.rule(0.0)
    return {
        "chosen": chosen,
        "arms": {name: arm_summary(rounds, name) for name in rounds.by_arm},
        "chosen_over": ratios_to(rounds, chosen),
    }


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Every kind of text, both sizes."""
    under_test = subject(options)
    log(under_test.target.statement)
    found = {}
    for name, workload in WORKLOADS.items():
        for size, pair in zip(SIZES, (under_test.pair, under_test.twin), strict=True):
            found[f"{name}, {size}"] = measure_pair(pair(workload), workload, options, log)
            log(f"{name}, {size}: {found[f'{name}, {size}']['chosen_over']}")
    refuted = [
        f"{name}: {rule}"
        for name, each in found.items()
        for rule in RULES
        if rule in each["chosen_over"] and each["chosen_over"][rule]["ci95"][1] < 1
    ]
    return {"target": under_test.target.to_json(), "texts": found, "refuted_by": refuted}


def table(result: Mapping[str, Any]) -> str:
    """Milliseconds per token and AAL of every rule, and what the chosen one is over the others."""
    lines = [
        f"{'ms per token, AAL':<24}"
        + "".join(f"{name:>16}" for name in (PLAIN_ARM, *RULES))
        + "   chosen, over the others"
    ]
    for name, found in result["texts"].items():
        cells = [
            f"{found['arms'][arm]['tpot_after_first_ms']['median']:.2f}, {found['arms'][arm]['aal']:.2f}"
            for arm in (PLAIN_ARM, *RULES)
        ]
        over = ", ".join(
            f"{rule} {found['chosen_over'][rule]['median']:.2f} {found['chosen_over'][rule]['ci95']}"
            for rule in RULES
            if rule != found["chosen"]
        )
        lines.append(
            f"{name:<24}" + "".join(f"{cell:>16}" for cell in cells) + f"   {found['chosen']}: {over}"
        )
    return "\n".join(lines)


def draw(figure: Figure, result: Mapping[str, Any]) -> None:
    """How many times faster than plain decoding every rule is."""
    texts = result["texts"]

    def speed(found: Mapping[str, Any], rule: str) -> float:
        return float(
            found["arms"][PLAIN_ARM]["tpot_after_first_ms"]["median"]
            / found["arms"][rule]["tpot_after_first_ms"]["median"]
        )

    axes = figure.subplots()
    bars(
        axes,
        [name.replace(", ", "\n") for name in texts],
        {rule: [speed(found, rule) for found in texts.values()] for rule in RULES},
        ylabel="times plain decoding",
    )
    axes.set_title("where the depth comes from")


CLAIM = Claim(
    name="depth",
    doc=__doc__,
    options=(prompts_option(8), tokens_option(64)),
    measure=measure,
    table=table,
    draw=draw,
)

if __name__ == "__main__":
    CLAIM.main()
