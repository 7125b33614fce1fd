"""How much faster is a target in bf16 with no draft model, by a draft that is made from itself?

The target at real size and the bundled one, each compiled alone. At temperatures 0 and 0.8 on stories, all
arms in turn, with the default policy, guard included:

- plain decoding;
- the chosen draft: rounded, and without the layers that change the hidden states little;
- a draft with all layers, which is only rounded;
- what repeats in the text, without a draft.

Six of the twelve layers of the target at real size add nothing to the text (bench/scale_pair.py). The
choice finds and drops them, which flatters the chosen draft there. The draft with all layers shows what
rounding alone gains, and the bundled target, whose layers all matter, what dropping layers costs.

Refuted for a target whose chosen draft is less than 1.7 times as fast as plain decoding at temperature 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.claim_roofline import at_least
from bench.lib.arms import PLAIN_ARM, arm_summary, plain_arm, policy_arm, ratios_to
from bench.lib.claim import Claim, Log, prompts_option, tokens_option
from bench.lib.harness import interleave
from bench.lib.pair import BenchTarget, bench_target, compiled_pair
from bench.lib.subject import PAIR_NAME, subject
from bench.lib.workloads import STORIES, beginnings
from yggdrasil.bundle import BUNDLED
from yggdrasil.config import AUTO, CompileConfig
from yggdrasil.models.load import load_config
from yggdrasil.pair import LoadedPair

WANTED = 1.7
TEMPERATURES = (0.0, 0.8)
CHOSEN = "chosen draft"
ALL_LAYERS = "draft with all layers"
REPEATS = "repeats alone"


def own_pairs(
    target: Path, name: str, config: CompileConfig, *, remeasure: bool
) -> tuple[LoadedPair, LoadedPair]:
    """The target with its chosen draft, and with the best one that has all layers."""
    chosen = replace(config, draft_weights=AUTO)
    whole = replace(chosen, draft_layers=load_config(str(target)).num_hidden_layers)
    first, second = (
        compiled_pair(target, None, name=f"{name}-{suffix}", remeasure=remeasure, config=each)
        for suffix, each in (("own", chosen), ("own-whole", whole))
    )
    return first, second


def measure_target(
    target: BenchTarget, name: str, options: argparse.Namespace, config: CompileConfig, log: Log
) -> dict[str, Any]:
    """All arms at every temperature."""
    log(target.statement)
    chosen, whole = own_pairs(target.folder, name, config, remeasure=options.remeasure)
    prompts = beginnings(STORIES.test_texts, chosen, options.prompts)
    found = {}
    for temperature in TEMPERATURES:
        given: dict[str, Any] = {"num_tokens": options.tokens, "temperature": temperature}
        policy, of_whole = (each.policy(temperature=temperature) for each in (chosen, whole))
        repeats = chosen.policy(temperature=temperature, draft=False)
        arms = [
            plain_arm(chosen, options.tokens, temperature=temperature),
            policy_arm(CHOSEN, chosen, policy, **given),
            policy_arm(ALL_LAYERS, whole, of_whole, **given),
            policy_arm(REPEATS, chosen, repeats, **given),
        ]
        log(f"temperature {temperature:g}")
        rounds = interleave(arms, prompts, reference=PLAIN_ARM, tick=log)
        others = {arm: ratios_to(rounds, arm)[PLAIN_ARM] for arm in (CHOSEN, ALL_LAYERS, REPEATS)}
        found[f"{temperature:g}"] = {
            "arms": {arm: arm_summary(rounds, arm) for arm in rounds.by_arm},
            "over_plain": others,
        }
    drafts = {CHOSEN: chosen, ALL_LAYERS: whole}
    return {
        "target": target.to_json(),
        "drafts": {
            arm: pair.bundle.own_draft.lines for arm, pair in drafts.items() if pair.bundle.own_draft
        },
        "temperatures": found,
    }


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """The target at real size, then the bundled one."""
    under_test = subject(options)
    bundled = bench_target(under_test.source, 0)
    real_size = f"{PAIR_NAME}-7b" if options.llama_7b else PAIR_NAME
    targets = {"real size": (under_test.target, real_size)}
    targets["bundled"] = (bundled, BUNDLED)
    found = {
        name: measure_target(target, pair_name, options, under_test.config, log)
        for name, (target, pair_name) in targets.items()
    }
    return {"targets": found, "goals": goals_of(found)}


def goals_of(found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the claim promises of every target."""
    return [
        at_least(name, each["temperatures"]["0"]["over_plain"][CHOSEN]["median"], WANTED)
        for name, each in found.items()
    ]


def table(result: Mapping[str, Any]) -> str:
    """The drafts, and every arm's milliseconds per token and gain over plain decoding."""
    lines = []
    for name, found in result["targets"].items():
        lines += [f"{name}: {found['target']['statement']}", *found["drafts"][CHOSEN]]
        for temperature, each in found["temperatures"].items():
            lines.append(f"temperature {temperature}")
            for arm, figures in each["arms"].items():
                over = each["over_plain"].get(arm)
                gain = "" if over is None else f"   {over['median']:.2f} times plain {over['ci95']}"
                ms = figures["tpot_after_first_ms"]["median"]
                lines.append(f"  {arm:<24}{ms:>8.2f} ms{figures['aal']:>7.2f} tokens{gain}")
    lines += [
        f"{'reached' if goal['reached'] else 'MISSED '} {goal['goal']}: {goal['measured']:.3f}, wanted "
        f"{goal['wanted']}"
        for goal in result["goals"]
    ]
    return "\n".join(lines)


CLAIM = Claim(
    name="no_draft",
    doc=__doc__,
    options=(prompts_option(10, minimum=1), tokens_option(96, minimum=1)),
    measure=measure,
    table=table,
)

if __name__ == "__main__":
    CLAIM.main()
