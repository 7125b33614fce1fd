"""What does each of the five optimisations gain, added one after another?

Paper: Fig. 12. Arms, greedy, interleaved prompt by prompt, each with everything of the one before:

- O1, latency-optimal trees, run eagerly: equal growth of W = 8, D = 16, its 64 best nodes verified, on
  uncompiled models;
- O2, graph compilation: the same trees on our graphs, as they run without a plan;
- O3, verification pruning: the same W and D, K chosen by the objective at every step;
- O4, scheduling: the same shapes under the plan that was searched for this pair; null where no plan was
  measured to gain, and then O5 runs so as well;
- O5, depth prediction: D, and W with it, by the depth predictor, guarded, under that plan;
- next to them, "Eq. 3, no predictor": O5 with the one shape that Eq. 3 prefers on calibration text. Like
  the paper's, O5's factor is over W = 8 and D = 16, which no one who has a profile would run; its ratio to
  this arm is what the predictor alone brings.

The factor of an optimisation is the time per token without it over that with it, prompt by prompt, prefill
left out, with the bootstrap 95 % interval of the median. O1 takes part in the first prompts only; its sums
differ in order, so its texts are compared, not asserted, and it is asserted instead that its trees write
what eager plain decoding writes. Refuted, optimisation by optimisation, by an interval below 1."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from bench.lib.arms import PLAIN_ARM, arm_summary, fixed_policy, plain_arm, policy_arm
from bench.lib.claim import Claim, Log, prompts_option, tokens_option
from bench.lib.eager import eager_engine
from bench.lib.harness import Arm, Rounds, interleave, ratio
from bench.lib.subject import subject
from bench.lib.workloads import STORIES, beginnings
from yggdrasil.engine import Engine
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.baselines import equal_growth

if TYPE_CHECKING:
    from matplotlib.figure import Figure

O1 = "O1 eager trees"
O2 = "O2 + compiled graphs"
O3 = "O3 + verification pruning"
O4 = "O4 + scheduling"
O5 = "O5 + depth predictor"
NO_PREDICTOR = "Eq. 3, no predictor"
EAGER_PROMPTS = 3
EAGER_CHECK_TOKENS = 16
PAPER = {O2: 2.775, O3: 1.07, O4: 1.21, O5: 1.10}


def unscheduled(pair: LoadedPair) -> LoadedPair:
    """The pair without its plans."""
    engine = pair.engine
    return replace(
        pair,
        engine=Engine(
            engine.target, engine.draft, max_context=engine.max_context, eos_tokens=tuple(engine.eos_tokens)
        ),
    )


def arms_of(pair: LoadedPair, num_tokens: int) -> tuple[list[Arm], LoadedPair]:
    """The five arms after plain decoding, and the eager pair of the first."""
    config = pair.bundle.config
    tree = equal_growth(config.widths[-1], config.max_depth)
    whole = replace(tree, verify=config.verify_widths[-1])
    eager = replace(pair, engine=eager_engine(pair.bundle))
    stepwise = unscheduled(pair)
    arms = [
        plain_arm(stepwise, num_tokens),
        replace(
            policy_arm(O1, eager, fixed_policy(pair, whole), num_tokens, num_prompts=EAGER_PROMPTS),
            exact=False,
        ),
        policy_arm(O2, stepwise, fixed_policy(pair, whole), num_tokens),
        policy_arm(O3, stepwise, fixed_policy(pair, tree), num_tokens),
        policy_arm(O5, pair, pair.policy(depth="predicted"), num_tokens),
        policy_arm(NO_PREDICTOR, pair, pair.policy(depth="fixed"), num_tokens),
    ]
    if pair.plan.greedy.plan is not None:
        arms.insert(-2, policy_arm(O4, pair, fixed_policy(pair, tree), num_tokens))
    return arms, eager


def assert_eager_texts(eager: LoadedPair, pair: LoadedPair, prompt: Sequence[int], num_tokens: int) -> None:
    """The eager trees against eager plain decoding."""
    tree = policy_arm("tree", eager, fixed_policy(pair, equal_growth(4, 4, 16)), num_tokens)
    rounds = interleave([plain_arm(eager, num_tokens), tree], [prompt], reference=PLAIN_ARM)
    assert len(rounds.by_arm) == 2


def factors(rounds: Rounds) -> dict[str, Any]:
    """Of every optimisation, over the arm before it."""
    steps = [name for name in (O1, O2, O3, O4, O5) if name in rounds.by_arm]
    return {
        name: {
            **ratio(rounds.later_tpots(before), rounds.later_tpots(name)),
            "over": before,
            "paper": PAPER[name],
        }
        for before, name in pairwise(steps)
    }


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """All arms on stories."""
    under_test = subject(options)
    pair = under_test.pair()
    log(under_test.target.statement)
    arms, eager = arms_of(pair, options.tokens)
    prompts = beginnings(STORIES.test_texts, pair, options.prompts)
    assert_eager_texts(eager, pair, prompts[0], min(EAGER_CHECK_TOKENS, options.tokens))
    rounds = interleave(arms, prompts, reference=PLAIN_ARM, tick=log)
    return {
        "target": under_test.target.to_json(),
        "plan": pair.plan.greedy.why(),
        "arms": {name: arm_summary(rounds, name) for name in rounds.by_arm}
        | ({} if O4 in rounds.by_arm else {O4: None}),
        "factors": factors(rounds),
        "predictor_alone": ratio(rounds.later_tpots(NO_PREDICTOR), rounds.later_tpots(O5)),
        "over_plain": {
            name: ratio(rounds.later_tpots(PLAIN_ARM), rounds.later_tpots(name))
            for name in rounds.by_arm
            if name != PLAIN_ARM
        },
    }


def table(result: Mapping[str, Any]) -> str:
    """Arm by arm."""
    lines = [f"{'arm':<28} {'ms/token':>9} {'AAL':>6} {'its own factor':>16}"]
    for name, arm in result["arms"].items():
        found = result["factors"].get(name)
        figures = (
            f"{arm['tpot_after_first_ms']['median']:>9.2f} {arm['aal']:>6.2f}"
            if arm
            else f"  {result['plan']}"
        )
        lines.append(
            f"{name:<28} {figures}"
            + (f" {found['median']:>8.2f} {found['ci95']} (paper {found['paper']})" if found else "")
        )
    alone = result["predictor_alone"]
    return "\n".join([*lines, f"O5 over {NO_PREDICTOR}: {alone['median']:.2f} {alone['ci95']}"])


def draw(figure: Figure, result: Mapping[str, Any]) -> None:
    """Milliseconds per token, falling from arm to arm, every factor with its interval."""
    left, right = figure.subplots(1, 2)
    arms = [name for name in (PLAIN_ARM, O1, O2, O3, O4, O5, NO_PREDICTOR) if result["arms"].get(name)]
    left.bar_label(
        left.barh(arms, [result["arms"][name]["tpot_after_first_ms"]["median"] for name in arms]),
        fmt="%.1f",
        fontsize=7,
    )
    left.invert_yaxis()
    left.set(title="optimisations, one after another (paper: Fig. 12)", xlabel="ms per token")
    found = result["factors"]
    medians = [each["median"] for each in found.values()]
    errors = [
        [each["median"] - each["ci95"][0] for each in found.values()],
        [each["ci95"][1] - each["median"] for each in found.values()],
    ]
    right.errorbar(medians, list(found), xerr=errors, fmt="o", capsize=3, label="ours, 95 %")
    right.plot([each["paper"] for each in found.values()], list(found), "kx", label="paper")
    right.axvline(1.0, color="grey", linewidth=0.8)
    right.invert_yaxis()
    right.set(title="each one's own factor", xlabel="times faster than without it")
    right.legend(fontsize=7)


CLAIM = Claim(
    name="breakdown",
    doc=__doc__,
    options=(prompts_option(12), tokens_option(64)),
    measure=measure,
    table=table,
    draw=draw,
    size=(12, 3.5),
    devices=("cpu", "cuda"),
)

if __name__ == "__main__":
    CLAIM.main()
