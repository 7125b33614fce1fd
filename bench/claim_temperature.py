"""Does the lead over a static tree hold when text is sampled?

Paper: Fig. 15 (1.49 times Sequoia on average). At temperatures 0, 0.3, 0.6 and 1, interleaved, every prompt
with its own seed: plain decoding, Sequoia's latency-aware tree for the acceptance by rank calibrated at the
nearest temperature, and the default policy. Both trees draft with the target's noise (step/coupling.py):
the ranks of Sequoia's tree are those after the noise. All arms must draw the same tokens.

Refuted at a temperature where the ratio of the default policy to Sequoia, or to plain, is below 1 with its
whole interval."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
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
from bench.lib.claim import Claim, Log, prompts_option, tokens_option
from bench.lib.harness import interleave
from bench.lib.subject import subject
from bench.lib.workloads import STORIES, beginnings
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.baselines import sequoia_latency

TEMPERATURES = (0.0, 0.3, 0.6, 1.0)
OURS = "yggdrasil"
SEQUOIA = "Sequoia"


def measure_at(
    pair: LoadedPair, temperature: float, options: argparse.Namespace, log: Log
) -> dict[str, Any]:
    """The three arms at one temperature."""
    config = pair.bundle.config
    acceptance = pair.acceptance.nearest(temperature)
    static = sequoia_latency(
        acceptance.by_rank, config.max_depth, pair.latency, config.verify_widths, options.tokens
    )
    log(f"temperature {temperature:g}: Sequoia {static}")
    arms = [
        plain_arm(pair, options.tokens, temperature=temperature),
        policy_arm(
            SEQUOIA,
            pair,
            fixed_policy(pair, static, temperature=temperature),
            options.tokens,
            temperature=temperature,
        ),
        policy_arm(
            OURS, pair, pair.policy(temperature=temperature), options.tokens, temperature=temperature
        ),
    ]
    rounds = interleave(
        arms, beginnings(STORIES.test_texts, pair, options.prompts), reference=PLAIN_ARM, tick=log
    )
    return {
        "sequoia": str(static),
        "arms": {name: arm_summary(rounds, name) for name in rounds.by_arm},
        "ours_over": ratios_to(rounds, OURS),
    }


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Every temperature on stories."""
    under_test = subject(options)
    pair = under_test.pair()
    log(under_test.target.statement)
    found = {
        f"{temperature:g}": measure_at(pair, temperature, options, log) for temperature in TEMPERATURES
    }
    means = geometric_means([each["ours_over"] for each in found.values()])
    calibrated_at = sorted(pair.acceptance.by_temperature)
    return {
        "target": under_test.target.to_json(),
        "calibrated_at": calibrated_at,
        "temperatures": found,
        "geometric_mean_ours_over": means,
    }


def table(result: Mapping[str, Any]) -> str:
    """Temperature by temperature."""
    lines = [
        f"{'temperature':<12}"
        + "".join(f"{f'{name}: ms, AAL':>22}" for name in (PLAIN_ARM, SEQUOIA, OURS))
        + "   ours over Sequoia, over plain"
    ]
    for temperature, found in result["temperatures"].items():
        cells = [
            f"{arm['tpot_after_first_ms']['median']:.2f}, {arm['aal']:.2f}"
            for arm in found["arms"].values()
        ]
        over = found["ours_over"]
        ratios = ", ".join(
            f"{over[name]['median']:.2f} {over[name]['ci95']}" for name in (SEQUOIA, PLAIN_ARM)
        )
        lines.append(f"{temperature:<12}" + "".join(f"{cell:>22}" for cell in cells) + f"   {ratios}")
    return "\n".join([*lines, f"geometric mean, ours over: {result['geometric_mean_ours_over']}"])


def draw(figure: Figure, result: Mapping[str, Any]) -> None:
    """Milliseconds per token against temperature, and our lead."""
    left, right = figure.subplots(1, 2)
    temperatures = [float(temperature) for temperature in result["temperatures"]]
    found = list(result["temperatures"].values())
    for name in (PLAIN_ARM, SEQUOIA, OURS):
        times = [each["arms"][name]["tpot_after_first_ms"] for each in found]
        errors = [
            [time["median"] - time["p10"] for time in times],
            [time["p90"] - time["median"] for time in times],
        ]
        left.errorbar(
            temperatures, [time["median"] for time in times], yerr=errors, fmt="o-", capsize=3, label=name
        )
    left.set(
        title="latency by temperature (paper: Fig. 15)",
        xlabel="temperature",
        ylabel="ms per token",
        ylim=(0, None),
    )
    for name in (PLAIN_ARM, SEQUOIA):
        right.plot(
            temperatures, [each["ours_over"][name]["median"] for each in found], "o-", label=f"over {name}"
        )
    right.axhline(1.0, color="grey", linewidth=0.8)
    right.set(title="yggdrasil", xlabel="temperature", ylabel="times faster", ylim=(0, None))
    for axes in (left, right):
        axes.legend(fontsize=7)


CLAIM = Claim(
    name="temperature",
    doc=__doc__,
    options=(prompts_option(10), tokens_option(64)),
    measure=measure,
    table=table,
    draw=draw,
)

if __name__ == "__main__":
    CLAIM.main()
