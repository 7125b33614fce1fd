"""What do linear layers of one order of summation cost on a GPU, and what do they bring?

Two pairs of the same models, compiled with `--exact` (the default there) and with `--no-exact`, whose
linear layers are cuBLAS's. Arms, greedy, interleaved prompt by prompt: plain decoding and the default
policy on each. For every pair it also reports which graphs round differently from plain decoding, as `ygg
compile` measured it, and on how many prompts its tree writes its own plain text.

The cost is the time per token with exact linear layers over that without, prompt by prompt, prefill left
out, with the bootstrap 95 % interval of the median. Refuted if the exact pair has a graph that rounds
differently, or if plain decoding or the default policy takes more than 3 % longer."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bench.lib.arms import PLAIN_ARM, arm_summary, our_arm, plain_arm
from bench.lib.claim import Claim, Log, bars, prompts_option, tokens_option
from bench.lib.harness import Arm, interleave, ratio
from bench.lib.subject import subject
from bench.lib.workloads import STORIES, beginnings
from yggdrasil.pair import LoadedPair
from yggdrasil.state import PLAIN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TREE = "tree"
CUBLAS_PLAIN = "plain, cuBLAS"
CUBLAS_TREE = "tree, cuBLAS"
MOST = 1.03


def arms_of(exact: LoadedPair, inexact: LoadedPair, num_tokens: int) -> list[Arm]:
    """Plain and tree on both pairs."""
    return [
        plain_arm(exact, num_tokens),
        our_arm(TREE, exact, num_tokens, 0.0, None),
        our_arm(CUBLAS_PLAIN, inexact, num_tokens, 0.0, PLAIN),
        our_arm(CUBLAS_TREE, inexact, num_tokens, 0.0, None),
    ]


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Both pairs on stories."""
    under_test = subject(options)
    exact = under_test.pair()
    inexact = under_test.inexact()
    log(under_test.target.statement)
    arms = arms_of(exact, inexact, options.tokens)
    rounds = interleave(
        arms, beginnings(STORIES.test_texts, exact, options.prompts), reference=PLAIN_ARM, tick=log
    )
    cost = {
        name: ratio(rounds.later_tpots(name), rounds.later_tpots(other))
        for name, other in ((PLAIN_ARM, CUBLAS_PLAIN), (TREE, CUBLAS_TREE))
    }
    return {
        "target": under_test.target.to_json(),
        "graphs_that_round_differently": {
            "exact": list(exact.bundle.inexact_widths),
            "cuBLAS": list(inexact.bundle.inexact_widths),
        },
        "tree_writes_plain_text": {
            "exact": rounds.agreement(TREE, PLAIN_ARM),
            "cuBLAS": rounds.agreement(CUBLAS_TREE, CUBLAS_PLAIN),
        },
        "arms": {arm.name: arm_summary(rounds, arm.name) for arm in arms},
        "cost": cost,
        "goals": {
            "exact": {
                "wanted": 0,
                "measured": len(exact.bundle.inexact_widths),
                "reached": not exact.bundle.inexact_widths,
            },
            **{
                name: {"wanted": MOST, "measured": found["median"], "reached": found["median"] <= MOST}
                for name, found in cost.items()
            },
        },
    }


def table(result: Mapping[str, Any]) -> str:
    """Arms, costs, goals."""
    lines = [
        f"{name:<16} {arm['tpot_after_first_ms']['median']:>9.3f} ms/token, AAL {arm['aal']:.2f}"
        for name, arm in result["arms"].items()
    ]
    lines += [
        f"cost of exactness, {name}: {found['median']:.3f} {found['ci95']}"
        for name, found in result["cost"].items()
    ]
    lines += [
        f"graphs that round differently, {name}: {widths or 'none'}"
        for name, widths in result["graphs_that_round_differently"].items()
    ]
    return "\n".join(
        [
            *lines,
            *(
                f"{'reached' if goal['reached'] else 'MISSED '} {name}"
                for name, goal in result["goals"].items()
            ),
        ]
    )


def draw(figure: Figure, result: Mapping[str, Any]) -> None:
    """Milliseconds per token, pair by pair."""
    ms = {name: arm["tpot_after_first_ms"]["median"] for name, arm in result["arms"].items()}
    bars(
        figure.subplots(),
        ("plain", "tree"),
        {"exact": [ms[PLAIN_ARM], ms[TREE]], "cuBLAS": [ms[CUBLAS_PLAIN], ms[CUBLAS_TREE]]},
        ylabel="ms per token",
    )


CLAIM = Claim(
    name="exact_cost",
    doc=__doc__,
    options=(prompts_option(12), tokens_option(64)),
    measure=measure,
    table=table,
    draw=draw,
    size=(6, 4),
    devices=("cuda",),
)

if __name__ == "__main__":
    CLAIM.main()
