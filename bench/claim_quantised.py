"""What do weights of 8 and 4 bits cost in perplexity, and what do they gain in speed and memory?

The pair at real size in three formats, on the same prompts. Perplexity: that of the test texts in the
compiled graphs, over that of the weights as they are. Forwards: every graph up to 32 tokens of every
format in turn, each after four of the same graph. Decoding: plain decoding and the default policy in
every format, all arms in turn at temperatures 0 and 0.8; within a format a text that differs from plain
decoding's ends the run. Memory: the part of the target's weight file that is resident after all that.

Refuted if int8 changes perplexity by more than 0.1 % or int4 by more than 3 %; if a forward of one token
takes more than 1.15 times its bytes over the measured rate; if int8 takes more than 1.3 times that for
eight tokens or 1.8 times for sixteen; or if the memory of int4 is above 0.35 of bf16's."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from bench.claim_roofline import GROWTH_OF_VERIFY, at_most, forward_sampler, in_turns, weight_bytes
from bench.lib.arms import arm_summary, our_arm, plain_arm
from bench.lib.claim import Claim, Log, Option, int_from, prompts_option, tokens_option
from bench.lib.harness import RESAMPLES, Arm, MemoryStream, Rounds, interleave, ratio, spread
from bench.lib.subject import subject
from bench.lib.workloads import STORIES, beginnings
from yggdrasil.compiler.weights import FILE_NAME
from yggdrasil.config import WEIGHTS
from yggdrasil.models.packing import Chunk
from yggdrasil.pair import LoadedPair
from yggdrasil.step.growth import run_chunks

TEMPERATURES = (0.0, 0.8)
CONTEXT = 64
MOST_SIZE = 32
MOST_PERPLEXITY = {"int8": 1.001, "int4": 1.03}
MOST_OVER_MEMORY = 1.15
GROWTH = GROWTH_OF_VERIFY["int8"]  # of the forward over that of one token, at most
MOST_MEMORY = 0.35  # of int4's resident weights, of bf16's
PLAIN = "plain"
TREE = "tree"


def text_losses(pair: LoadedPair, texts: Sequence[str]) -> list[tuple[float, int]]:
    """The sum of the target's losses on each text, in nats, and the number of its predicted tokens.

    The logits are those of the compiled graphs, over a cache that holds one text at a time.
    """
    target: Any = pair.engine.target
    found = []
    for text in texts:
        tokens = pair.tokenizer.encode(text)[: pair.engine.max_context]
        target.cache.rollback_(0)
        forwards = run_chunks(target, [Chunk(0, tokens[:-1], 0)], target.prefill_chunk)
        logits_NV = torch.cat([each_NV.float() for _, (each_NV, _) in forwards])
        predicted = torch.tensor(tokens[1:])
        # the last graph may be larger than its chunk
        loss = functional.cross_entropy(logits_NV[: len(predicted)], predicted, reduction="sum")
        found.append((float(loss), len(predicted)))
    return found


def perplexity_of(
    losses: Sequence[tuple[float, int]], before: Sequence[tuple[float, int]]
) -> dict[str, Any]:
    """Perplexity, and its ratio to that of other weights on the same texts with a bootstrap 95 % interval.

    Args:
        losses: The sum of losses of each text, and its number of tokens.
        before: The same of the weights as they are.
    """
    pairs = zip(losses, before, strict=True)
    sums = np.array([[loss - loss_before, loss, count] for (loss, count), (loss_before, _) in pairs])
    changed, lost, num_tokens = sums.sum(axis=0)
    draws = sums[np.random.default_rng(0).integers(len(sums), size=(RESAMPLES, len(sums)))].sum(axis=1)
    low, high = np.percentile(np.exp(draws[:, 0] / draws[:, 2]), (2.5, 97.5))
    return {
        "perplexity": round(math.exp(lost / num_tokens), 4),
        "ratio": round(math.exp(changed / num_tokens), 5),
        "ci95": [round(float(low), 5), round(float(high), 5)],
        "texts": len(losses),
        "tokens": int(num_tokens),
    }


def measure_perplexity(pairs: Mapping[str, LoadedPair], num_texts: int, log: Log) -> dict[str, Any]:
    """Of every format on the first test texts, over that of bf16."""
    texts = STORIES.test_texts[:num_texts]
    losses = {}
    for name, pair in pairs.items():
        losses[name] = text_losses(pair, texts)
        log(f"perplexity in {name} on {len(texts)} texts")
    return {name: perplexity_of(each, losses["bf16"]) for name, each in losses.items()}


def arms_of(pair: LoadedPair, weights: str, num_tokens: int, temperature: float) -> list[Arm]:
    """Plain decoding and the default policy of one format; other formats write other texts."""
    plain = plain_arm(pair, num_tokens, temperature=temperature)
    tree = our_arm(TREE, pair, num_tokens, temperature, None)
    return [replace(arm, name=f"{weights} {arm.name}", exact=False) for arm in (plain, tree)]


def measure_decoding(
    pairs: Mapping[str, LoadedPair], temperature: float, options: argparse.Namespace, log: Log
) -> dict[str, Any]:
    """Both arms of every format in turn.

    Raises:
        TextMismatchError: a tree wrote other tokens than plain decoding with the same weights.
    """
    log(f"temperature {temperature:g}")
    arms = [arm for name, pair in pairs.items() for arm in arms_of(pair, name, options.tokens, temperature)]
    prompts = beginnings(STORIES.test_texts, next(iter(pairs.values())), options.prompts)
    rounds = interleave(arms, prompts, reference=arms[0].name, tick=log)
    for name in pairs:
        trees = [replace(arm, exact=True) for arm in arms if arm.name == f"{name} {TREE}"]
        rounds.assert_equal_texts(trees, reference=f"{name} {PLAIN}")
    return {name: _format_json(rounds, name) for name in pairs}


def _format_json(rounds: Rounds, weights: str) -> dict[str, Any]:
    own = Rounds({name: rounds.by_arm[f"{weights} {name}"] for name in (PLAIN, TREE)}, [])
    return {
        "arms": {name: arm_summary(own, name) for name in own.by_arm},
        "tree_over_plain": ratio(own.later_tpots(PLAIN), own.later_tpots(TREE)),
    }


def measure_forwards(
    pairs: Mapping[str, LoadedPair], rounds: int, log: Log
) -> tuple[float, dict[str, dict[str, Any]]]:
    """The rate of memory, and milliseconds of the target's graphs by format and tokens.

    One token runs as the smallest graph.
    """
    targets: dict[str, Any] = {name: pair.engine.target for name, pair in pairs.items()}
    samplers: dict[Any, Any] = {
        (name, size): forward_sampler(target, size, CONTEXT)
        for name, target in targets.items()
        for size in target.menu.sizes
        if size <= MOST_SIZE
    }
    samples = in_turns({"memory": MemoryStream().gb_per_s, **samplers}, rounds, log)
    gb_per_s = spread(samples.pop("memory"))["median"]
    found: dict[str, dict[str, Any]] = {
        name: {"weight_bytes": weight_bytes(target), "ms": {}} for name, target in targets.items()
    }
    for (name, size), times in samples.items():
        found[name]["ms"][str(size)] = spread(times)
    for each in found.values():
        each["memory_ms"] = round(each["weight_bytes"] / gb_per_s / 1e6, 4)
    return gb_per_s, found


def resident_bytes(mapped: Path, maps: str) -> int:
    """The resident part of a mapped file; what is mapped several times counts once.

    Args:
        maps: `/proc/self/smaps`.
    """
    largest: dict[str, int] = {}  # by offset in the file
    offset = ""
    for line in maps.splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            offset = words[2] if words[-1] == str(mapped) else ""
        elif offset and words[0] == "Rss:":
            largest[offset] = max(largest.get(offset, 0), int(words[1]) << 10)
    return sum(largest.values())


def goals_of(formats: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the claim promises of the measured formats."""
    goals = []
    for name, found in formats.items():
        if name == "bf16":
            continue
        ms = {int(size): each["median"] for size, each in found["forward"]["ms"].items()}
        narrow = ms[min(ms)]
        change = max(found["quality"]["ratio"], 2 - found["quality"]["ratio"])
        goals.append(at_most(f"{name}: change of perplexity", change, MOST_PERPLEXITY[name]))
        over = narrow / found["forward"]["memory_ms"]
        goals.append(at_most(f"{name}: T(1) over bytes / rate", over, MOST_OVER_MEMORY))
        if name == "int8":
            grown = {size: ms[size] / narrow for size in GROWTH}
            goals += [at_most(f"int8: T({size})/T(1)", grown[size], most) for size, most in GROWTH.items()]
        if name == "int4":
            share = found["resident_bytes"] / formats["bf16"]["resident_bytes"]
            goals.append(at_most("int4: memory over bf16's", share, MOST_MEMORY))
    return goals


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Perplexity, forwards, decoding, memory."""
    under_test = subject(options)
    log(under_test.target.statement)
    pairs = {
        name: replace(under_test, config=replace(under_test.config, weights=name)).pair()
        for name in WEIGHTS
    }
    quality = measure_perplexity(pairs, options.texts, log)
    gb_per_s, forwards = measure_forwards(pairs, options.rounds, log)
    decoding = {f"{each:g}": measure_decoding(pairs, each, options, log) for each in TEMPERATURES}
    maps = Path("/proc/self/smaps").read_text()
    formats: dict[str, Any] = {
        name: {
            "quality": quality[name],
            "forward": forwards[name],
            "temperatures": {temperature: each[name] for temperature, each in decoding.items()},
            "resident_bytes": resident_bytes(pair.bundle.target_weights(0) / FILE_NAME, maps),
        }
        for name, pair in pairs.items()
    }
    return {
        "target": under_test.target.to_json(),
        "gb_per_s": gb_per_s,
        "formats": formats,
        "goals": goals_of(formats),
    }


def table(result: Mapping[str, Any]) -> str:
    """Format by format."""
    sizes = sorted({int(size) for each in result["formats"].values() for size in each["forward"]["ms"]})
    lines = [f"memory {result['gb_per_s']:.1f} GB/s", f"{'':<6}{'perplexity':>11}{'MB':>7}" + _head(sizes)]
    for name, found in result["formats"].items():
        change = f"{100 * (found['quality']['ratio'] - 1):+.2f} %"
        ms = "".join(_cell(found["forward"]["ms"], size) for size in sizes)
        lines.append(f"{name:<6}{change:>11}{found['resident_bytes'] / 1e6:>7.0f}{ms}")
    for name, found in result["formats"].items():
        for temperature, each in found["temperatures"].items():
            rates = {arm: each["arms"][arm]["tok_per_s"] for arm in (PLAIN, TREE)}
            over = each["tree_over_plain"]
            lines.append(
                f"{name:<6}temperature {temperature}: plain {rates[PLAIN]:.1f} tokens/s, tree "
                f"{rates[TREE]:.1f}, {over['median']:.2f} {over['ci95']}"
            )
    lines += [
        f"{'reached' if goal['reached'] else 'MISSED '} {goal['goal']}: {goal['measured']:.3f}, wanted "
        f"{goal['wanted']}"
        for goal in result["goals"]
    ]
    return "\n".join(lines)


def _head(sizes: Sequence[int]) -> str:
    return "".join(f"{f'T({size})':>9}" for size in sizes)


def _cell(ms: Mapping[str, Mapping[str, float]], size: int) -> str:
    return f"{ms[str(size)]['median']:>9.2f}" if str(size) in ms else f"{'-':>9}"


CLAIM = Claim(
    name="quantised",
    doc=__doc__,
    options=(
        prompts_option(10, minimum=1),
        tokens_option(64, minimum=1),
        Option("--texts", "for perplexity", default=60, quick=2, type=int_from(1)),
        Option("--rounds", "turns of all graphs", default=21, quick=2, type=int_from(1)),
    ),
    measure=measure,
    table=table,
)

if __name__ == "__main__":
    CLAIM.main()
