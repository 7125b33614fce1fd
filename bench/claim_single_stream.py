"""Is a compiled equal-growth tree the fastest exact way to decode one stream, and is the plain decoding it
is compared with a fair one?

Arms, interleaved prompt by prompt, greedy, bf16, the same number of new tokens each:

- transformers eager: `generate`, plain;
- transformers assisted: `assistant_model=` with its defaults and with a constant k of 3, 5 and 8; the best
  of them counts, chosen on the test prompts;
- plain: our compiled decoding without speculation;
- chain: the same engine with W = 1 and the best depth from 2 to the largest that a tree may have, chosen
  on calibration text and not on the test prompts; K still follows the objective, so a chain is cut where
  its draft is unsure;
- tree: the default policy, which chooses (W, D, K) by Eq. 3 from the profile and may choose a chain or
  plain decoding.

Refuted if the tree emits other tokens than plain decoding (then no speed is reported), if it is slower than
the best chain, less than 2.2 times as fast as plain or less than twice as fast as the best transformers
arm; the baseline is unfair if plain is less than twice as fast as transformers eager or streams its weights
at less than 75 % of the memory rate measured between the rounds.

With `--device cuda` there is one more arm, plain decoding whose kernels are launched one by one; the memory
rate is the device's, plain has to stream at 80 % of it, the tree has to be twice as fast as plain, and the
host's share of a step, measured with the device waited for after every graph, has to be below 5 %.

The headline of an arm is wall clock of the whole call, prefill included, by new token; decoding alone is
reported next to it. The target is a function-preserving inflation of the bundled one (bench/scale_pair.py):
real acceptance at real latency."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from bench.lib.arms import PLAIN_ARM, arm_summary, our_arm, plain_arm, uncaptured
from bench.lib.claim import Claim, Log, Option, int_from, prompts_option, tokens_option
from bench.lib.harness import Arm, DeviceStream, MemoryStream, Rounds, Stream, interleave, ratio, spread
from bench.lib.pair import TEST_TEXT, BenchTarget, bench_target, compiled_pair, prompts_from
from bench.lib.subject import PAIR_NAME, subject
from bench.peers.processes import ASSISTED, EAGER, transformers_arms
from yggdrasil.bundle import bundled_models
from yggdrasil.errors import UsageError
from yggdrasil.offline.latencies import curve_json
from yggdrasil.offline.traces import CALIBRATION_TEXT
from yggdrasil.pair import LoadedPair
from yggdrasil.report.recording import record_timeline
from yggdrasil.state import PLAIN, Shape

ASSISTANT_TOKENS = (3, 5, 8)
TUNING_PROMPTS = 4
TUNING_TOKENS = 64
CHAIN_ARM = "chain"
TREE_ARM = "tree"
UNCAPTURED_ARM = "plain, no CUDA graphs"
WANTED = {
    "cpu": {
        "tree_over_plain": 2.2,
        "tree_over_best_chain": 1.0,
        "tree_over_best_transformers": 2.0,
        "plain_over_transformers_eager": 2.0,
    },
    "cuda": {
        "tree_over_plain": 2.0,
        "tree_over_best_chain": 1.0,
        "tree_over_best_transformers": 2.0,
        "plain_over_transformers_eager": 1.0,
    },
}
WANTED_SHARE = {"cpu": 0.75, "cuda": 0.8}  # of the memory's rate
MOST_HOST_SHARE = 0.05


def our_arms(pair: LoadedPair, num_tokens: int, temperature: float, chain_depth: int) -> list[Arm]:
    """Plain, chain and tree."""
    shapes = {CHAIN_ARM: Shape(1, chain_depth), TREE_ARM: None}
    arms = [
        plain_arm(pair, num_tokens, temperature=temperature),
        *(our_arm(name, pair, num_tokens, temperature, shape) for name, shape in shapes.items()),
    ]
    if pair.bundle.config.device == "cuda":
        arms.append(our_arm(UNCAPTURED_ARM, uncaptured(pair), num_tokens, temperature, PLAIN))
    return arms


def num_tuning_prompts(options: argparse.Namespace) -> int:
    """Prompts that a chain is tuned on."""
    return 1 if options.quick else TUNING_PROMPTS


def tune_chain(
    pair: LoadedPair, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float
) -> tuple[int, dict[str, float]]:
    """The fastest chain depth on validation prompts, and milliseconds per token of every depth."""
    chains = {f"D={depth}": depth for depth in range(2, pair.bundle.config.max_depth + 1)}
    plain = plain_arm(pair, num_tokens, temperature=temperature)
    arms = [
        plain,
        *(our_arm(name, pair, num_tokens, temperature, Shape(1, depth)) for name, depth in chains.items()),
    ]
    rounds = interleave(arms, prompts, reference=PLAIN_ARM)
    return chains[rounds.fastest(list(chains))], {
        arm.name: spread(rounds.tpots(arm.name))["median"] for arm in arms
    }


def ratios(rounds: Rounds) -> dict[str, Any]:
    """How many times faster, arm against arm, prompt by prompt; peers only where they took part."""
    tree = rounds.tpots(TREE_ARM)
    plain = rounds.tpots(PLAIN_ARM)
    found = {
        "tree_over_plain": ratio(plain, tree),
        "tree_over_plain_after_first": ratio(rounds.later_tpots(PLAIN_ARM), rounds.later_tpots(TREE_ARM)),
        "tree_over_best_chain": ratio(rounds.tpots(CHAIN_ARM), tree),
        "chain_over_plain": ratio(plain, rounds.tpots(CHAIN_ARM)),
    }
    if UNCAPTURED_ARM in rounds.by_arm:
        found["plain_over_no_cuda_graphs"] = ratio(rounds.tpots(UNCAPTURED_ARM), plain)
    peers = [name for name in rounds.by_arm if name == EAGER or name.startswith(ASSISTED)]
    if peers:
        best = rounds.fastest(peers)
        found["tree_over_best_transformers"] = {
            **ratio(rounds.tpots(best), tree),
            "best_transformers": best,
        }
        found["plain_over_transformers_eager"] = ratio(rounds.tpots(EAGER), plain)
    return found


def roofline(rounds: Rounds, weight_bytes: int) -> dict[str, Any]:
    """Plain decoding against the time that the memory needs for the weights alone, with the rate measured
    in the same round.
    """
    ceilings_ms = [weight_bytes / rate / 1e6 for rate in rounds.stream_gb_per_s]
    shares = [
        ceiling / tpot for ceiling, tpot in zip(ceilings_ms, rounds.later_tpots(PLAIN_ARM), strict=True)
    ]
    return {
        "stream_gb_per_s": spread(rounds.stream_gb_per_s),
        "weights_ms": spread(ceilings_ms),
        "plain_share": spread(shares),
    }


def goals(
    found: dict[str, Any],
    ceiling: dict[str, Any],
    device: str = "cpu",
    host: dict[str, float] | None = None,
) -> dict[str, Any]:
    """What the claim needs, what was measured, and whether that is enough."""
    wanted = WANTED[device]
    measured = {name: found[name]["median"] for name in wanted if name in found} | {
        "plain_share_of_roofline": ceiling["plain_share"]["median"]
    }
    reached = {
        name: {"wanted": limit, "measured": measured[name], "reached": measured[name] >= limit}
        for name, limit in {**wanted, "plain_share_of_roofline": WANTED_SHARE[device]}.items()
        if name in measured
    }
    if host is not None:
        reached["host_share_at_most"] = {
            "wanted": MOST_HOST_SHARE,
            "measured": host["share"],
            "reached": host["share"] <= MOST_HOST_SHARE,
        }
    return reached


def host_share(pair: LoadedPair, prompt: Sequence[int]) -> dict[str, float]:
    """The part of a step outside the graphs when each of them is waited for: no less than where they run
    after the host.
    """
    timeline = record_timeline(pair, prompt)
    return {
        "step_ms": round(timeline.total_ms, 4),
        "host_ms": round(timeline.host_ms, 4),
        "share": round(timeline.host_ms / timeline.total_ms, 4),
    }


def subject_of(options: argparse.Namespace) -> tuple[BenchTarget, Path, LoadedPair]:
    """Target, draft and the pair of them: the folders that were named, else the bundled ones; inflated and
    compiled as need be.
    """
    if options.target is None and options.draft is None:
        under_test = subject(options)
        return under_test.target, under_test.draft, under_test.pair()
    if options.device != "cpu":
        raise UsageError("--target and --draft are measured on a cpu", "leave them out for --device cuda")
    bundled_target, bundled_draft = bundled_models()
    target = bench_target((options.target or bundled_target).resolve(), options.target_parameters)
    draft = (options.draft or bundled_draft).resolve()
    return target, draft, compiled_pair(target.folder, draft, name=PAIR_NAME, remeasure=options.remeasure)


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Build what is missing, measure, and return the result document."""
    target, draft, pair = subject_of(options)
    log(target.statement)
    stream: Stream = MemoryStream() if options.device == "cpu" else DeviceStream()
    rate = stream.gb_per_s(rounds=7)
    log(
        f"ceiling: memory streams at {rate:.1f} GB/s, so plain decoding takes at least "
        f"{target.weight_bytes / rate / 1e6:.2f} ms a token"
    )
    depth, tuning = tune_chain(
        pair,
        prompts_from(CALIBRATION_TEXT, pair, num_tuning_prompts(options)),
        min(TUNING_TOKENS, options.tokens),
        options.temperature,
    )
    log(f"best chain on calibration text: D={depth} (ms per token: {tuning})")
    arms = our_arms(pair, options.tokens, options.temperature, depth)
    if options.peer_prompts != 0 and options.temperature == 0:
        peers = {
            "num_tokens": options.tokens,
            "assistant_tokens": ASSISTANT_TOKENS,
            "num_prompts": options.peer_prompts,
            "device": options.device,
        }
        arms += transformers_arms(target.folder, draft, **peers)
    prompts = prompts_from(TEST_TEXT, pair, options.prompts)
    rounds = interleave(arms, prompts, reference=PLAIN_ARM, stream=stream, tick=log)
    known = {"chain_depth": depth, "chain_tuning_tpot_ms": tuning}
    if options.device == "cuda":
        known["host"] = host_share(pair, prompts[0])
    return document(options, target, pair, rounds, known)


def document(
    options: argparse.Namespace,
    target: BenchTarget,
    pair: LoadedPair,
    rounds: Rounds,
    known: dict[str, Any],
) -> dict[str, Any]:
    """The result document."""
    found = ratios(rounds)
    ceiling = roofline(rounds, target.weight_bytes)
    return {
        "target": target.to_json(),
        "settings": {
            "tokens": options.tokens,
            "prompts_by_arm": {name: len(done) for name, done in rounds.by_arm.items()},
            "temperature": options.temperature,
            "device": options.device,
        },
        "models": {
            "pair": pair.bundle.name,
            "dtype": pair.bundle.config.dtype,
            "fingerprint": pair.bundle.folder.name,
        },
        **known,
        "arms": {name: arm_summary(rounds, name) for name in rounds.by_arm},
        "ratios": found,
        "roofline": ceiling,
        "speedup": {
            "predicted": round(
                mean(each.detail["predicted_speedup"] for each in rounds.by_arm[TREE_ARM]), 3
            ),
            "measured": found["tree_over_plain_after_first"]["median"],
        },
        "profile": {
            "draft_ms": curve_json(pair.latency.draft),
            "verify_ms": curve_json(pair.latency.verify),
        },
        "goals": goals(found, ceiling, options.device, known.get("host")),
    }


def table(result: Mapping[str, Any]) -> str:
    """The result for a person."""
    lines = [
        result["target"]["statement"],
        f"{'arm':<30} {'ms/token':>9} {'p10':>7} {'p90':>7} {'decoding':>9} {'tok/s':>7} {'AAL':>5}  "
        "same text as plain",
    ]
    for name, arm in result["arms"].items():
        tpot = arm["tpot_ms"]
        same = arm["same_text_as_plain"]
        figures = (
            f"{tpot['median']:>9.2f} {tpot['p10']:>7.2f} {tpot['p90']:>7.2f} "
            f"{arm['tpot_after_first_ms']['median']:>9.2f} {arm['tok_per_s']:>7.1f}"
        )
        lines.append(
            f"{name:<30} {figures} {arm['aal']:>5.2f}  {same['equal_prompts']} of {same['prompts']}"
        )
    for name, found in result["ratios"].items():
        lines.append(
            f"{name:<30} {found['median']:.2f} (p10 {found['p10']:.2f}, p90 {found['p90']:.2f}, 95 % of "
            f"the median {found['ci95']})"
        )
    ceiling = result["roofline"]
    speedup = result["speedup"]
    lines.append(
        f"roofline: {ceiling['stream_gb_per_s']['median']:.1f} GB/s, "
        f"{ceiling['weights_ms']['median']:.2f} ms for the weights"
    )
    lines.append(
        f"speedup of the tree: predicted {speedup['predicted']:.2f}, measured "
        f"{speedup['measured']:.2f}; shapes {result['arms'][TREE_ARM]['shapes']}"
    )
    if "host" in result:
        lines.append(
            f"host: {result['host']['host_ms']:.3f} of {result['host']['step_ms']:.3f} ms of a step, "
            f"{result['host']['share']:.1%}"
        )
    lines.append(f"T_verify (ms): {_curve(result['profile']['verify_ms'])}")
    lines += [
        f"{'reached' if goal['reached'] else 'MISSED '} {name}: {goal['measured']:.2f} of {goal['wanted']}"
        for name, goal in result["goals"].items()
    ]
    return "\n".join(lines)


def _curve(curve: dict[str, Any]) -> str:
    return (
        ", ".join(
            f"{size} tokens {ms:.2f}" for size, ms in zip(curve["sizes"], curve["ms"][0], strict=True)
        )
        + f" at context {curve['contexts'][0]}"
    )


def variant(options: argparse.Namespace) -> list[str]:
    """A temperature has files of its own."""
    return [f"temperature_{options.temperature:g}"] if options.temperature else []


CLAIM = Claim(
    name="single_stream",
    doc=__doc__,
    options=(
        prompts_option(20, minimum=1),
        Option(
            "--peer-prompts",
            "run the transformers arms on the first N prompts only (default: all)",
            type=int_from(0),
            metavar="N",
        ),
        tokens_option(128, minimum=2),
        Option("--temperature", "sample if above 0, our arms only, into a result of its own", default=0.0),
        Option("--target", "folder of the target (default: the bundled one)", type=Path),
        Option("--draft", "folder of the draft (default: the bundled one)", type=Path),
    ),
    measure=measure,
    table=table,
    devices=("cpu", "cuda"),
    variant=variant,
)

if __name__ == "__main__":
    CLAIM.main()
