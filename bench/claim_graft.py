"""Does text that repeats draft itself, and does text that does not pay nothing for it?

The edited story and the edited code repeat their prompt with a name changed, the summary is every second
sentence of it. The bundled target copies nothing, so there its forwards run and the given text's tokens get
the largest logit (bench/lib/replay.py). Stories are the target's own text. Interleaved, greedy, the default
policy unguarded:

- plain decoding;
- the draft alone;
- the draft and grafts, the default;
- transformers' prompt look-up with 5 and 10 tokens, on text that repeats.

There are four times as many stories, and the two arms with a draft decode each of them five times: the
half per cent in question is small. The ratio of a story is that of the medians of its times.

Refuted where grafts are less than 1.3 times as fast as the draft alone or less than 1.2 times as fast as
the better look-up on text that repeats, or below 0.995 of the draft alone on stories."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.lib.arms import PLAIN_ARM, arm_summary, plain_arm, policy_arm, ratios_to
from bench.lib.claim import Claim, Log, prompts_option, tokens_option
from bench.lib.harness import Arm, Generation, interleave, ratio
from bench.lib.replay import replayed_pair
from bench.lib.subject import subject
from bench.lib.workloads import STORIES, WORKLOADS, beginnings
from bench.peers.processes import LOOKUP, lookup_arms
from yggdrasil.pair import LoadedPair

DRAFT_ARM = "draft alone"
GRAFT_ARM = "draft and grafts"
LOOKUP_LENGTHS = (5, 10)
WANTED_OVER_DRAFT = 1.3
WANTED_OVER_LOOKUP = 1.2
WANTED_ON_STORIES = 0.995
STORIES_OVER_TEXTS = 4
TURNS = 5
NAMES = re.compile(r"\b(Tim|Tom|Lily|Mia|Ben|Sue|Sam|Anna|Max|Lucy|Jack|Sara|Timmy|Spot)\b")
WORD = re.compile(r"[a-z_]{4,}")


def edited_story(text: str) -> str:
    """The story of somebody else."""
    return NAMES.sub("Zoe", text)


def edited_code(text: str) -> str:
    """The code with its most frequent word renamed."""
    words = WORD.findall(text)
    return text.replace(max(words, key=lambda word: (words.count(word), word)), "renamed")


def summary(text: str) -> str:
    """Every second sentence."""
    return " ".join(re.split(r"(?<=[.!?])\s+", text)[::2])


TASKS: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "edited stories": ("stories", edited_story),
    "edited code": ("code", edited_code),
    "summaries": ("stories", summary),
}


def our_arms(pair: LoadedPair, num_tokens: int) -> list[Arm]:
    """Plain decoding, the draft alone, the draft and grafts."""
    return [
        plain_arm(pair, num_tokens),
        policy_arm(DRAFT_ARM, pair, pair.policy(guard=False, graft=0), num_tokens),
        policy_arm(GRAFT_ARM, pair, pair.policy(guard=False), num_tokens),
    ]


def measure_task(
    pair: LoadedPair, folder: Path, name: str, options: argparse.Namespace, log: Log
) -> dict[str, Any]:
    """All arms on one kind of text that repeats."""
    workload, answer = TASKS[name]
    encode = pair.tokenizer.encode
    texts = WORKLOADS[workload].test_texts
    pairs = [(encode(f"{text}\n\n"), encode(answer(text))) for text in texts]
    fitting = [
        (prompt, written[: options.tokens])
        for prompt, written in pairs
        if len(written) >= options.tokens and len(prompt) + options.tokens < pair.engine.max_context
    ][: options.prompts]
    replayed, target = replayed_pair(pair)
    answer_of = {tuple(prompt): written for prompt, written in fitting}
    arms = [
        *our_arms(replayed, options.tokens),
        *lookup_arms(folder, num_tokens=options.tokens, lengths=LOOKUP_LENGTHS, text=lambda: target.text),
    ]

    def written(arm: Arm) -> Arm:
        def generate(prompt: Sequence[int]) -> Generation:
            target.text = [*prompt, *answer_of[tuple(prompt)]]
            return arm.generate(prompt)

        return replace(arm, generate=generate)

    rounds = interleave(
        [written(arm) for arm in arms], [prompt for prompt, _ in fitting], reference=PLAIN_ARM, tick=log
    )
    peers = [arm for arm in rounds.by_arm if arm.startswith(LOOKUP)]
    return {
        "arms": {arm: arm_summary(rounds, arm) for arm in rounds.by_arm},
        "grafts_over": ratios_to(rounds, GRAFT_ARM),
        "best_look_up": rounds.fastest(peers),
    }


def measure_stories(pair: LoadedPair, options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Our arms on the target's own stories, which repeat little."""
    prompts = beginnings(STORIES.test_texts, pair, STORIES_OVER_TEXTS * options.prompts)
    arms = our_arms(pair, options.tokens)
    rounds = interleave(arms, prompts[: options.prompts], reference=PLAIN_ARM, tick=log)
    turns = [interleave(arms[1:], prompts, reference=DRAFT_ARM, tick=log) for _ in range(TURNS)]
    draft_ms, graft_ms = (
        [median(times) for times in zip(*(turn.later_tpots(arm) for turn in turns), strict=True)]
        for arm in (DRAFT_ARM, GRAFT_ARM)
    )
    return {
        "arms": {arm: arm_summary(rounds, arm) for arm in rounds.by_arm},
        "grafts_over": {**ratios_to(rounds, GRAFT_ARM), DRAFT_ARM: ratio(draft_ms, graft_ms)},
    }


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Every kind of text."""
    under_test = subject(options)
    pair = under_test.pair()
    log(under_test.target.statement)
    found = {"stories": measure_stories(pair, options, log)}
    for name in TASKS:
        found[name] = measure_task(pair, under_test.target.folder, name, options, log)
    return {"target": under_test.target.to_json(), "texts": found, "refuted_by": refuted_by(found)}


def refuted_by(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What misses its limit."""
    missed = []
    for name, each in found.items():
        over = each["grafts_over"]
        limits = {DRAFT_ARM: WANTED_ON_STORIES}
        if name in TASKS:
            limits = {DRAFT_ARM: WANTED_OVER_DRAFT, each["best_look_up"]: WANTED_OVER_LOOKUP}
        missed += [f"{name}: {arm}" for arm, limit in limits.items() if over[arm]["median"] < limit]
    return missed


def table(result: Mapping[str, Any]) -> str:
    """Milliseconds per token and emitted tokens of every arm, and grafts over the others."""
    lines = []
    for name, found in result["texts"].items():
        lines.append(name)
        for arm, figures in found["arms"].items():
            over = found["grafts_over"].get(arm)
            ratio = "" if over is None else f"   grafts are {over['median']:.2f} times {over['ci95']}"
            ms = figures["tpot_after_first_ms"]["median"]
            lines.append(f"  {arm:<28}{ms:>8.2f} ms{figures['aal']:>7.2f} tokens{ratio}")
    return "\n".join([*lines, f"refuted by: {result['refuted_by'] or 'nothing'}"])


CLAIM = Claim(
    name="graft", doc=__doc__, measure=measure, table=table, options=[prompts_option(12), tokens_option(96)]
)

if __name__ == "__main__":
    CLAIM.main()
