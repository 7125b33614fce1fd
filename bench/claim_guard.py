"""Does a user lose anything when the draft is of no use?

Two ways for a pair to expect more than it gets, both with the calibration that the intact pair earned
on stories:

- a shuffled draft: the rows of its embedding are permuted in memory, so that it guesses nothing right;
- another domain: prompts of code.

Arms, greedy, interleaved: plain decoding; the default policy, new for every prompt as for every request, so
that each must find out for itself; the same without its guard. Wall clock of the whole call, prefill of the
draft included.

A server decodes batches of 1 and 4 of the same prompts: its default policy, which learns from one batch to
the next and measures plain steps itself, and a policy that never speculates.

Refuted if the default policy takes more than 1.03 times as long as plain decoding in the median, in the
server more than 1.01 times, or if a text is not plain decoding's."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from matplotlib.figure import Figure

from bench.claim_batched_trees import served
from bench.lib.arms import PLAIN_ARM, arm_summary, plain_arm, policy_arm
from bench.lib.claim import Claim, Log, bars, prompts_option, tokens_option
from bench.lib.harness import Arm, Generation, TextMismatchError, interleave, ratio
from bench.lib.subject import subject
from bench.lib.workloads import STORIES, WORKLOADS, beginnings
from yggdrasil.config import GenerateConfig, ServeConfig
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.gamma.registry import batch_policy
from yggdrasil.serve.load import load_batcher, policy_parts

SHUFFLED = "shuffled draft"
CODE = "code, calibrated on stories"
GUARDED = "guarded"
UNGUARDED = "unguarded"
ALLOWED = 1.03
ALLOWED_IN_SERVER = 1.01
SERVER_SIZES = (1, 4)


def shuffle_draft_(draft: Any) -> None:
    """Permute the draft's embedding in memory; the file keeps its rows."""
    embedding = next(
        tensor for name, tensor in draft.weights.items() if name.endswith("embed_tokens.weight")
    )
    embedding.copy_(embedding[torch.randperm(len(embedding), generator=torch.Generator().manual_seed(0))])


def fresh_arm(name: str, pair: LoadedPair, num_tokens: int) -> Arm:
    """The default policy, a new one for every prompt."""

    def generate(prompt: Sequence[int]) -> Generation:
        return policy_arm(name, pair, pair.policy(guard=name == GUARDED), num_tokens).generate(prompt)

    return Arm(name=name, generate=generate)


def measure_case(
    pair: LoadedPair, prompts: Sequence[Sequence[int]], num_tokens: int, log: Log
) -> dict[str, Any]:
    """The three arms."""
    arms = [
        plain_arm(pair, num_tokens),
        fresh_arm(GUARDED, pair, num_tokens),
        fresh_arm(UNGUARDED, pair, num_tokens),
    ]
    rounds = interleave(arms, prompts, reference=PLAIN_ARM, tick=log)
    over = {name: ratio(rounds.tpots(name), rounds.tpots(PLAIN_ARM)) for name in (GUARDED, UNGUARDED)}
    return {
        "arms": {name: arm_summary(rounds, name) for name in rounds.by_arm},
        "time_over_plain": over,
        "held": over[GUARDED]["median"] <= ALLOWED,
    }


def measure_server(
    pair: LoadedPair, prompts: Sequence[list[int]], num_tokens: int, *, is_shuffled: bool, log: Log
) -> dict[str, Any]:
    """The server's policies on batches of every size."""
    config = ServeConfig(max_batch=max(SERVER_SIZES), elastic=False)
    batcher = load_batcher(pair.bundle, config)
    if is_shuffled:
        shuffle_draft_(batcher.draft)
    generation = GenerateConfig(max_new_tokens=num_tokens, ignore_eos=True)
    over = {}
    for size in SERVER_SIZES:
        parts = policy_parts(pair.bundle, config)
        policies = {name: batch_policy(name, parts) for name in ("trees", "off")}
        seconds: dict[str, list[float]] = {name: [] for name in policies}
        for turn in range(len(prompts)):
            batch = [prompts[(size * turn + row) % len(prompts)] for row in range(size)]
            runs = {name: served(batcher, policy, batch, generation) for name, policy in policies.items()}
            if runs["trees"].texts != runs["off"].texts:
                raise TextMismatchError(f"{size} requests of the server: not plain decoding's text")
            for name, run in runs.items():
                seconds[name].append(run.seconds)
        over[str(size)] = ratio(seconds["trees"], seconds["off"])
        log(f"server, {size} requests: time over plain {over[str(size)]}")
    held = all(each["median"] <= ALLOWED_IN_SERVER for each in over.values())
    return {"time_over_plain": over, "held": held}


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Both cases, alone and in the server."""
    under_test = subject(options)
    log(under_test.target.statement)
    shuffled = under_test.pair()
    intact = replace(under_test, remeasure=False).pair()
    shuffle_draft_(shuffled.engine.draft)
    stories = beginnings(STORIES.test_texts, intact, options.prompts)
    code = beginnings(WORKLOADS["code"].test_texts, intact, options.prompts)
    cases = {
        SHUFFLED: measure_case(shuffled, stories, options.tokens, log),
        CODE: measure_case(intact, code, options.tokens, log),
    }
    server = {
        SHUFFLED: measure_server(intact, stories, options.tokens, is_shuffled=True, log=log),
        CODE: measure_server(intact, code, options.tokens, is_shuffled=False, log=log),
    }
    return {
        "target": under_test.target.to_json(),
        "allowed": ALLOWED,
        "cases": cases,
        "allowed_in_server": ALLOWED_IN_SERVER,
        "server": server,
    }


def table(result: Mapping[str, Any]) -> str:
    """Case by case."""
    lines = []
    for case, found in result["cases"].items():
        lines.append(f"{case:<30} {'ms/token':>9} {'AAL':>6} {'time over plain':>16}")
        for name, arm in found["arms"].items():
            over = found["time_over_plain"].get(name)
            lines.append(
                f"  {name:<28} {arm['tpot_ms']['median']:>9.2f} {arm['aal']:>6.2f}"
                + (f" {over['median']:>9.3f} {over['ci95']}" if over else "")
            )
        lines.append(f"  {'held' if found['held'] else 'MISSED'}: at most {result['allowed']}")
    lines.append(f"in the server, at most {result['allowed_in_server']}:")
    for case, found in result["server"].items():
        over = ", ".join(f"{size}: {each['median']:.3f}" for size, each in found["time_over_plain"].items())
        lines.append(f"  {case:<28} time over plain by requests: {over}")
    return "\n".join(lines)


def draw(figure: Figure, result: Mapping[str, Any]) -> None:
    """Time over plain decoding."""
    axes = figure.subplots()
    cases = result["cases"]
    bars(
        axes,
        list(cases),
        {
            name: [found["time_over_plain"][name]["median"] for found in cases.values()]
            for name in (GUARDED, UNGUARDED)
        },
        ylabel="time, in plain decoding's",
    )
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.axhline(result["allowed"], color="red", linewidth=0.8, linestyle=":")
    axes.set_title("what a useless draft costs")


CLAIM = Claim(
    name="guard",
    doc=__doc__,
    options=(prompts_option(10), tokens_option(128)),
    measure=measure,
    table=table,
    draw=draw,
    size=(7, 4),
)

if __name__ == "__main__":
    CLAIM.main()
