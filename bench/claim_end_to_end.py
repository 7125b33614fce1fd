"""Is the default policy the fastest way to decode one stream among the structures of other systems, on
every kind of text and with either draft?

Paper: Fig. 10. One engine, one plan and one set of graphs for all, so structures and policies differ and
nothing else. Arms, greedy, interleaved:

- plain: no speculation;
- sequence (vLLM-Spec), DISCO, K-ary (SpecInfer), OPT-Tree: settings tuned on validation text, by tokens
  counted there and Eq. 3;
- Sequoia: its latency-aware tree for the acceptance by rank of this kind of text;
- yggdrasil: the default policy, calibrated on this kind of text.

on stories, wiki and code, with the bundled draft and a smaller one where `bench/data/draft_small` has it.
Refuted where a ratio of yggdrasil to an arm is below 1 with its whole interval, or if a text is not plain
decoding's. Unlike the paper's, the baselines run in our runtime: what our compilation alone gains is
measured by `claim_runtimes` and `claim_breakdown`."""

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
from bench.lib.claim import Claim, Log, bars, prompts_option, tokens_option
from bench.lib.counting import Counter, candidates
from bench.lib.harness import interleave
from bench.lib.subject import Subject, subject
from bench.lib.workloads import WORKLOADS, Workload, beginnings
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.baselines import sequoia_latency
from yggdrasil.state import Shape

OURS = "yggdrasil"
SPECINFER = "K-ary"
SEQUOIA = "Sequoia"
DRAFT_NAMES = ("bundled", "small")
TUNED = ("sequence", "DISCO", SPECINFER, "OPT-Tree")
TUNING_PROMPTS = 4
TUNING_TOKENS = 48


def tuned_shapes(
    under_test: Subject, pair: LoadedPair, workload: Workload, options: argparse.Namespace
) -> dict[str, Shape]:
    """Every baseline at its best setting for this kind of text."""
    twin = under_test.twin(workload)
    prompts = beginnings(workload.validation_texts, pair, min(TUNING_PROMPTS, options.prompts))
    counter = Counter(twin, pair.latency, prompts, num_tokens=min(TUNING_TOKENS, options.tokens))
    shapes = {
        name: choices[counter.best(choices)] for name in TUNED for choices in [candidates(name, pair)]
    }
    config = pair.bundle.config
    acceptance = pair.acceptance.nearest(0.0)
    shapes[SEQUOIA] = sequoia_latency(
        acceptance.by_rank, config.max_depth, pair.latency, config.verify_widths, options.tokens
    )
    return shapes


def measure_workload(
    under_test: Subject, workload: Workload, options: argparse.Namespace, log: Log
) -> dict[str, Any]:
    """All arms on one kind of text."""
    pair = under_test.pair(workload)
    shapes = tuned_shapes(under_test, pair, workload, options)
    log(
        f"{under_test.draft_name} draft, {workload}: "
        + ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    )
    arms = [
        plain_arm(pair, options.tokens),
        *(
            policy_arm(name, pair, fixed_policy(pair, shape), options.tokens)
            for name, shape in shapes.items()
        ),
    ]
    arms.append(policy_arm(OURS, pair, pair.policy(), options.tokens))
    rounds = interleave(
        arms, beginnings(workload.test_texts, pair, options.prompts), reference=PLAIN_ARM, tick=log
    )
    return {
        "settings": {name: str(shape) for name, shape in shapes.items()},
        "arms": {name: arm_summary(rounds, name) for name in rounds.by_arm},
        "ours_over": ratios_to(rounds, OURS),
        "over_specinfer": {
            name: round(found["median"], 3) for name, found in _over(rounds, SPECINFER).items()
        },
    }


def _over(rounds: Any, reference: str) -> dict[str, dict[str, Any]]:
    """Every arm as a multiple of the reference's speed."""
    return {name: ratios_to(rounds, name)[reference] for name in rounds.by_arm if name != reference}


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Every draft that is there, every kind of text."""
    drafts: dict[str, Any] = {}
    for draft_name in DRAFT_NAMES:
        under_test = subject(options, draft_name)
        workloads = {
            name: measure_workload(under_test, workload, options, log)
            for name, workload in WORKLOADS.items()
        }
        drafts[draft_name] = {
            "workloads": workloads,
            "geometric_mean_ours_over": geometric_means([each["ours_over"] for each in workloads.values()]),
        }
    ratios = [each["ours_over"] for draft in drafts.values() for each in draft["workloads"].values()]
    return {
        "target": subject(options).target.to_json(),
        "drafts": drafts,
        "geometric_mean_ours_over": geometric_means(ratios),
    }


def table(result: Mapping[str, Any]) -> str:
    """Milliseconds per token, AAL and our ratio to every arm."""
    lines = []
    for draft_name, draft in result["drafts"].items():
        for workload, found in draft["workloads"].items():
            lines.append(
                f"{draft_name} draft, {workload:<10} {'ms/token':>10} {'AAL':>6} {'ours is faster by':>18}"
            )
            for name, arm in found["arms"].items():
                over = found["ours_over"].get(name)
                figures = f"  {name:<22} {arm['tpot_after_first_ms']['median']:>14.2f} {arm['aal']:>6.2f}"
                lines.append(
                    figures
                    + (f" {over['median']:>8.2f} {over['ci95']}" if over else "")
                    + f"  {found['settings'].get(name, '')}"
                )
    lines.append(f"geometric mean over all, ours over: {result['geometric_mean_ours_over']}")
    return "\n".join(lines)


def draw(figure: Figure, result: Mapping[str, Any]) -> None:
    """Speed as a multiple of SpecInfer's structure, kind of text by kind of text."""
    drafts = {name: draft["workloads"] for name, draft in result["drafts"].items()}
    for axes, (name, workloads) in zip(
        figure.subplots(1, len(drafts), squeeze=False)[0], drafts.items(), strict=True
    ):
        order = (PLAIN_ARM, "sequence", "DISCO", SEQUOIA, "OPT-Tree", OURS)
        bars(
            axes,
            list(workloads),
            {arm: [found["over_specinfer"][arm] for found in workloads.values()] for arm in order},
            ylabel="times as fast as K-ary (SpecInfer)",
        )
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set_title(f"end to end, {name} draft (paper: Fig. 10)")


CLAIM = Claim(
    name="end_to_end",
    doc=__doc__,
    options=(prompts_option(8), tokens_option(64)),
    measure=measure,
    table=table,
    draw=draw,
    size=(12, 4.5),
)

if __name__ == "__main__":
    CLAIM.main()
