"""Does a pair that was calibrated in batches decode as fast as one that was calibrated one text and one
tree at a time?

On the same graphs and with the same latencies: traces collected one by one (bench/lib/one_by_one.py) and in
batches within the budget of `ygg compile`; from each an acceptance table and a depth predictor. Interleaved
on held-out text, greedy and sampled: plain decoding and the default policy over each. The scaled pair and
the small one that computes the same function.

The same work varies by more than 1 % on the clock. So the steps are also summed by the profile, where a
shape always takes the same time.

Refuted if on either pair, at either temperature, batches lose more than 1 % of the milliseconds per token:
by the profile over all prompts, or on the clock in the median over prompts."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from bench.lib.arms import PLAIN_ARM, arm_summary, plain_arm, policy_arm, ratios_to
from bench.lib.claim import Claim, Log, bars, prompts_option, tokens_option
from bench.lib.harness import Rounds, interleave
from bench.lib.one_by_one import collect_one_by_one
from bench.lib.subject import subject
from bench.lib.workloads import STORIES, beginnings
from yggdrasil.offline.traces import Passage, Traces, further_passages
from yggdrasil.offline.tuning import (
    CALIBRATION_TEMPERATURES,
    calibrate,
    collect,
    save_learnt,
    train_depth,
    whole_size,
)
from yggdrasil.pair import LoadedPair, load_pair
from yggdrasil.report.progress import RichProgress
from yggdrasil.state import Shape
from yggdrasil.store import storage

ONE_BY_ONE = "one by one"
BATCHED = "in batches"
WRITING_DEPTH = 6  # of the trees with which texts are written one by one
MIN_RATIO = 0.99

Prompts = Sequence[Sequence[int]]


def further(pair: LoadedPair) -> list[Passage]:
    """More prompts from the texts that are calibrated on."""
    return further_passages(
        STORIES.calibration_texts[: pair.bundle.config.calibration_texts], pair.tokenizer
    )


def collected_one_by_one(pair: LoadedPair, prompts: Prompts) -> list[Traces]:
    """All that the configuration asks for, whatever it takes."""
    passages = further(pair)
    size = whole_size(pair.bundle, len(prompts), len(prompts) + len(passages))
    writing = Shape(
        size.reference_width, min(WRITING_DEPTH, size.max_depth), pair.bundle.config.verify_widths[:3][-1]
    )
    return [
        collect_one_by_one(pair.engine, prompts, passages, temperature, size, writing)
        for temperature in CALIBRATION_TEMPERATURES
    ]


def collected_in_batches(pair: LoadedPair, prompts: Prompts) -> list[Traces]:
    """As `ygg compile` does."""
    models: Any = pair.engine.target, pair.engine.draft
    return collect(pair.bundle, models, prompts, further(pair), RichProgress())


def learnt(
    name: str, pair: LoadedPair, collector: Callable[[LoadedPair, Prompts], list[Traces]]
) -> tuple[LoadedPair, dict[str, Any]]:
    """The pair with what one collector's traces teach, and what collecting them took."""
    prompts = beginnings(STORIES.calibration_texts, pair, pair.bundle.config.calibration_texts)
    start = time.perf_counter()
    traces = collector(pair, prompts)
    seconds = time.perf_counter() - start
    acceptance = calibrate(traces, RichProgress())
    predictor, report = train_depth(
        pair.bundle, pair.engine, prompts[0], traces, acceptance, pair.latency, RichProgress()
    )
    bundle = replace(pair.bundle, dataset=f"claim-{name.replace(' ', '-')}")
    save_learnt(bundle, acceptance, predictor, report)
    found = {
        "seconds": round(seconds, 2),
        "trees": sum(len(trace.deep) for trace in traces),
        "texts": len(set(traces[0].text_N.tolist())),
    }
    taught = load_pair(bundle.name, dataset=bundle.dataset)
    storage.remove(bundle.predictor_folder(bundle.dataset))  # or `ygg show` would offer it
    return taught, found


def measure_pair(pair: LoadedPair, options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Both calibrations of one pair, then decoding at every calibrated temperature."""
    collectors = {ONE_BY_ONE: collected_one_by_one, BATCHED: collected_in_batches}
    pairs = {name: learnt(name, pair, collector) for name, collector in collectors.items()}
    found: dict[str, Any] = {
        "collected": {name: cost for name, (_, cost) in pairs.items()},
        "temperatures": {},
    }
    log(f"{pair.bundle.name}: {found['collected']}")
    for temperature in CALIBRATION_TEMPERATURES:
        arms = [plain_arm(pair, options.tokens, temperature=temperature)]
        for name, (calibrated, _) in pairs.items():
            arms.append(
                policy_arm(
                    name,
                    calibrated,
                    calibrated.policy(temperature=temperature),
                    options.tokens,
                    temperature=temperature,
                )
            )
        rounds = interleave(
            arms, beginnings(STORIES.test_texts, pair, options.prompts), reference=PLAIN_ARM, tick=log
        )
        ratio = ratios_to(rounds, BATCHED)[ONE_BY_ONE]
        by_profile = profile_ms(rounds, ONE_BY_ONE) / profile_ms(rounds, BATCHED)
        found["temperatures"][f"{temperature:g}"] = {
            "arms": {name: arm_summary(rounds, name) for name in rounds.by_arm},
            "batched_over_one_by_one": ratio,
            "by_profile": round(by_profile, 4),
            "held": by_profile >= MIN_RATIO and ratio["median"] >= MIN_RATIO,
        }
    return found


def profile_ms(rounds: Rounds, arm: str) -> float:
    """Milliseconds of all steps of an arm by the profile."""
    return float(sum(generation.detail["profile_ms"] for generation in rounds.by_arm[arm]))


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """The scaled pair and its small twin."""
    under_test = subject(options)
    log(under_test.target.statement)
    pairs = {pair.bundle.name: pair for pair in (under_test.pair(), under_test.twin())}
    return {
        "target": under_test.target.to_json(),
        "pairs": {name: measure_pair(pair, options, log) for name, pair in pairs.items()},
    }


def table(result: Mapping[str, Any]) -> str:
    """Pair by pair, temperature by temperature."""
    heading = f"{'pair':<24}{'temperature':<12}{ONE_BY_ONE:>14}{BATCHED:>14}"
    lines = [f"{heading}   batches over one by one, by the profile"]
    for name, pair in result["pairs"].items():
        for temperature, found in pair["temperatures"].items():
            cells = "".join(
                f"{found['arms'][arm]['tpot_ms']['median']:>11.3f} ms" for arm in (ONE_BY_ONE, BATCHED)
            )
            ratio = found["batched_over_one_by_one"]
            lines.append(
                f"{name:<24}{temperature:<12}{cells}   {ratio['median']:.3f} "
                f"{ratio['ci95']} {found['by_profile']:.3f}{'' if found['held'] else '  REFUTED'}"
            )
        costs = [f"{cost['seconds']:.0f} s {arm}" for arm, cost in pair["collected"].items()]
        lines.append(f"{name}: collected in {', '.join(costs)}")
    return "\n".join(lines)


def draw(figure: Figure, result: Mapping[str, Any]) -> None:
    """Milliseconds per token under both calibrations."""
    places = [
        (name, temperature)
        for name, pair in result["pairs"].items()
        for temperature in pair["temperatures"]
    ]
    arms = [result["pairs"][name]["temperatures"][temperature]["arms"] for name, temperature in places]
    heights = {arm: [each[arm]["tpot_ms"]["median"] for each in arms] for arm in (ONE_BY_ONE, BATCHED)}
    bars(
        figure.subplots(),
        [f"{name}, T = {temperature}" for name, temperature in places],
        heights,
        ylabel="ms per token",
    )


CLAIM = Claim(
    name="calibration",
    doc=__doc__,
    options=(prompts_option(60), tokens_option(64)),
    measure=measure,
    table=table,
    draw=draw,
)

if __name__ == "__main__":
    CLAIM.main()
