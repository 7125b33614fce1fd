"""Do trees in batches decode faster than chains in batches?

The paper names batched trees as its open problem (Yggdrasil section 9). Batches of 1 to 16 requests of
the same length run to their end, on one batcher, arms in turns: the policy of trees, the same policy
restricted to chains (W = 1), the server's policy of chains (nightjar), and plain decoding. With one request
there are ten times as many texts, and `ygg generate`. Greedy and sampled; all arms must write the same
texts.

Refuted at a batch where trees have less than 0.99 of the chains' tokens per second, or less than 0.99 of
plain decoding's, with the whole interval; and with one request below 0.97 of `ygg generate`, or without
speculation below 0.97 of `ygg generate --plain`; and where trees in batches of 16 spend at least 8 % of
their time outside the graphs."""

from __future__ import annotations

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from bench.lib.claim import Claim, Log, prompts_option, tokens_option
from bench.lib.harness import TextMismatchError, ratio, spread
from bench.lib.subject import subject
from bench.lib.workloads import STORIES, beginnings
from yggdrasil.config import GenerateConfig, SamplingConfig, ServeConfig
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.gamma.protocol import BatchPolicy
from yggdrasil.policy.gamma.registry import PolicyParts, batch_policy
from yggdrasil.policy.trees import Trees
from yggdrasil.report import run as command
from yggdrasil.serve.batcher import Batcher
from yggdrasil.serve.cohorts import Cohorts
from yggdrasil.serve.load import load_batcher, policy_parts
from yggdrasil.serve.request import Event, Request

SIZES = (1, 2, 4, 8, 16)
TEMPERATURES = (0.0, 0.8)
MORE_TURNS = 3  # times `--prompts`, over the size: a single text decodes at very uneven speed
FEWEST_TURNS = 2  # times `--prompts`, for any size: six batches were too few
MOST_TURNS = 10  # the same with one request, whose ratio to `ygg generate` is to be known to 3 %
TREES = "trees"
CHAINS = "the same policy, W = 1"
NIGHTJAR = "nightjar"
PLAIN = "plain"
ALONE = "ygg generate"
ALONE_PLAIN = "ygg generate --plain"


def new_policies(parts: PolicyParts) -> dict[str, BatchPolicy]:
    """Every arm's policy, which has seen nothing yet."""
    assert parts.trees is not None
    return {
        TREES: batch_policy("trees", parts),
        CHAINS: Trees(replace(parts.trees, widths=(1,)), parts.switching_cost),
        NIGHTJAR: batch_policy("nightjar", parts),
        PLAIN: batch_policy("off", parts),
    }


@dataclass
class Run:
    """One batch from its first step to its last.

    Args:
        texts: Tokens of every request.
        seconds: Wall clock.
        steps: Passes of the target.
        graph_ms: Milliseconds in the graphs of both models.
    """

    texts: list[list[int]]
    seconds: float
    steps: int
    graph_ms: float


def served(
    batcher: Batcher,
    policy: BatchPolicy,
    cohorts: Cohorts,
    prompts: Sequence[list[int]],
    config: GenerateConfig,
) -> Run:
    """Decode the prompts as one batch, with what this arm has learnt so far."""
    batcher.policy = policy
    batcher.cohorts = cohorts
    batcher.pool.flush_()
    texts: list[list[int]] = [[] for _ in prompts]

    def keep(text: list[int], event: Event) -> None:
        text.extend(event.tokens)

    for prompt, text in zip(prompts, texts, strict=True):
        request = Request(
            prompt=prompt, config=config, speculation=None, num_top=None, on_event=partial(keep, text)
        )
        batcher.submit(batcher.ticket(request))
    models = batcher.target, batcher.draft
    before_ms = sum(model.graph_ms for model in models)
    start = time.perf_counter()
    steps = 0
    while batcher.step() is not None:
        steps += 1
    seconds = time.perf_counter() - start
    return Run(texts, seconds, steps, sum(model.graph_ms for model in models) - before_ms)


def alone(pair: LoadedPair, prompts: Sequence[list[int]], config: GenerateConfig) -> Run:
    """Decode the only prompt as `ygg generate` does, text included."""
    [prompt] = prompts
    models = pair.engine.target, pair.engine.draft
    before_ms = sum(model.graph_ms for model in models)
    start = time.perf_counter()
    whole = command.Run(pair, prompt, config).complete()
    seconds = time.perf_counter() - start
    graph_ms = sum(model.graph_ms for model in models) - before_ms
    return Run([whole.tokens], seconds, len(whole.results), graph_ms)


def measure_size(
    pair: LoadedPair,
    batcher: Batcher,
    parts: PolicyParts,
    prompts: Sequence[list[int]],
    config: GenerateConfig,
    size: int,
    num_turns: int,
) -> dict[str, Any]:
    """All arms in turns on batches of one size."""
    arms: dict[str, Callable[..., Run]] = {
        name: partial(served, batcher, policy, Cohorts()) for name, policy in new_policies(parts).items()
    }
    if size == 1:
        arms[ALONE] = partial(alone, pair)
        arms[ALONE_PLAIN] = lambda texts, settings: alone(pair, texts, replace(settings, plain=True))
    batches = [
        [prompts[(size * turn + row) % len(prompts)] for row in range(size)] for turn in range(num_turns)
    ]
    runs: dict[str, list[Run]] = defaultdict(list)
    order = list(arms)
    for turn, batch in enumerate([batches[0], *batches]):  # the first one warms up
        settings = replace(config, sampling=replace(config.sampling, seed=turn))
        done = {name: arms[name](batch, settings) for name in order}
        order = [*order[1:], order[0]]  # memory may change its pace within a turn
        if len({str(run.texts) for run in done.values()}) > 1:
            raise TextMismatchError(f"arms wrote different texts in batch {turn} of {size}")
        for name, run in done.items() if turn else ():
            runs[name].append(run)
    tokens = size * (config.max_new_tokens or 0)
    return {
        "arms": {
            name: {
                "tok_per_s": spread([tokens / run.seconds for run in each]),
                "tokens_per_pass": round(tokens * len(each) / sum(run.steps for run in each), 2),
                "host_share": round(
                    1 - sum(run.graph_ms for run in each) / sum(run.seconds for run in each) / 1e3, 4
                ),
            }
            for name, each in runs.items()
        },
        "trees_over": {
            name: ratio([run.seconds for run in each], [run.seconds for run in runs[TREES]])
            for name, each in runs.items()
            if name != TREES
        },
        "plain_over_alone_plain": ratio(
            [run.seconds for run in runs[ALONE_PLAIN]], [run.seconds for run in runs[PLAIN]]
        )
        if size == 1
        else None,
    }


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Every batch size at every temperature."""
    under_test = subject(options)
    pair = under_test.pair()
    log(under_test.target.statement)
    config = ServeConfig(max_batch=max(SIZES), elastic=False)
    batcher = load_batcher(pair.bundle, config)
    parts = policy_parts(pair.bundle, config)
    prompts = beginnings(STORIES.test_texts, pair, MOST_TURNS * options.prompts)
    found: dict[str, dict[str, Any]] = {}
    for temperature in TEMPERATURES:
        generation = GenerateConfig(
            max_new_tokens=options.tokens, ignore_eos=True, sampling=SamplingConfig(temperature=temperature)
        )
        found[f"{temperature:g}"] = {}
        for size in SIZES:
            turns = MOST_TURNS if size == 1 else MORE_TURNS
            num_turns = max(FEWEST_TURNS * options.prompts, math.ceil(turns * options.prompts / size))
            each = measure_size(pair, batcher, parts, prompts, generation, size, num_turns)
            found[f"{temperature:g}"][str(size)] = each
            over = {name: value["median"] for name, value in each["trees_over"].items()}
            share = each["arms"][TREES]["host_share"]
            log(f"temperature {temperature:g}, {size} requests: trees over {over}, host {share:.1%}")
    return {"target": under_test.target.to_json(), "temperatures": found}


def table(result: Mapping[str, Any]) -> str:
    """Batch by batch."""
    lines = [
        f"{'temperature, requests':<24}{'arm':<26}{'tokens/s':>10}{'per pass':>10}{'host':>8}"
        "   trees over it"
    ]
    for temperature, sizes in result["temperatures"].items():
        for size, found in sizes.items():
            for name, arm in found["arms"].items():
                over = found["trees_over"].get(name)
                compared = f"{over['median']:.2f} {over['ci95']}" if over else ""
                lines.append(
                    f"{f'{temperature}, {size}':<24}{name:<26}{arm['tok_per_s']['median']:>10.1f}"
                    f"{arm['tokens_per_pass']:>10.2f}{arm['host_share']:>8.1%}   {compared}"
                )
    return "\n".join(lines)


def draw(figure: Figure, result: Mapping[str, Any]) -> None:
    """Tokens per second against the number of requests."""
    temperatures = result["temperatures"]
    for axes, (temperature, sizes) in zip(
        figure.subplots(1, len(temperatures)), temperatures.items(), strict=True
    ):
        for name in (TREES, CHAINS, NIGHTJAR, PLAIN):
            speeds = [found["arms"][name]["tok_per_s"]["median"] for found in sizes.values()]
            axes.plot([int(size) for size in sizes], speeds, "o-", label=name)
        axes.set(
            title=f"temperature {temperature}",
            xlabel="requests",
            ylabel="tokens per second",
            ylim=(0, None),
        )
        axes.legend(fontsize=7)


CLAIM = Claim(
    name="batched_trees",
    doc=__doc__,
    options=(prompts_option(6), tokens_option(96)),
    measure=measure,
    table=table,
    draw=draw,
)

if __name__ == "__main__":
    CLAIM.main()
