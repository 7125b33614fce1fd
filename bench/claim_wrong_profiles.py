"""Does the server notice that its profile is wrong?

A server decodes 1, 4 or 8 requests at a time. Its policy of trees starts with a right profile or with a
wrong one:

- busy: measured next to another job, every graph 1 to 2.5 times as slow as it is;
- quiet: measured before the machine got busy, every graph 1 to 2.5 times as fast as it is;
- two graphs: the target's graph that plain decoding runs seems twice as slow, the one that trees run most
  half as slow as it is;
- other text: acceptance calibrated on source code, for stories.

Each profile serves twice: to the policy that learns from its steps, which is the server's, and to the same
policy without learning, a pure cost model. Tokens per second count after the first 300 steps.

`--clock profile` is the default: the small pair that computes the function of the scaled one decodes, and
every forward takes the time of the scaled pair's profile, so nothing disturbs a comparison of a few
percent. `--clock own` runs the scaled pair itself, all arms in turns.

Refuted if the policy that learns has less than 0.97 of the right profile's throughput with a wrong profile,
or less than 0.99 of the pure cost model's with the right one; or if no wrong profile costs the pure cost
model 3 % anywhere, since then there was nothing to learn."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bench.lib.claim import Claim, Log, Option, bars
from bench.lib.serving import Arrival, Clock, OwnClock, ProfileClock, Replay, in_turns, same_texts
from bench.lib.subject import Subject, subject
from bench.lib.workloads import STORIES, WORKLOADS
from yggdrasil.config import ServeConfig
from yggdrasil.pair import load_measurements
from yggdrasil.policy.gamma.protocol import Outcome
from yggdrasil.policy.gamma.registry import PolicyParts
from yggdrasil.policy.latency import Curve, LatencyModel
from yggdrasil.policy.trees import TreeParts, Trees
from yggdrasil.serve.batcher import Batcher
from yggdrasil.serve.load import load_batcher, policy_parts

SIZES = (1, 4, 8)
RIGHT = "right"
LEARNS = "learns"
COST_MODEL = "cost model"
PROFILES = (RIGHT, "busy", "quiet", "two graphs", "other text")
LEARNING_STEPS = 300
PROMPT_TOKENS = 24
TOKENS = 64
TOKENS_PER_STEP = 8  # of a row, more than any arm emits
PAGES = 400
BUSY = (1.0, 2.5)
MIN_SHARE = 0.97
MIN_SHARE_RIGHT = 0.99


class CostModel(Trees):
    """The policy of trees without learning and exploring."""

    def observe(self, outcome: Outcome) -> None:
        pass


POLICIES = {LEARNS: Trees, COST_MODEL: CostModel}


def busy(latency: LatencyModel, power: int = 1) -> LatencyModel:
    """Every graph slower by a factor of its own, or as much faster if `power` is -1."""
    random = np.random.default_rng(0)

    def disturbed(curve: Curve) -> Curve:
        return curve.slower({size: float(random.uniform(*BUSY)) ** power for size in curve.sizes})

    return replace(latency, draft=disturbed(latency.draft), verify=disturbed(latency.verify))


def two_graphs(latency: LatencyModel) -> LatencyModel:
    """The smallest graph of the target twice as slow, its widest half as slow."""
    verify = latency.verify
    return replace(latency, verify=verify.slower({verify.sizes[0]: 2.0, verify.widest: 0.5}))


def tree_parts(parts: PolicyParts, under_test: Subject) -> dict[str, TreeParts]:
    """What the policy starts from, by profile."""
    right = parts.trees
    assert right is not None
    code = under_test.twin(WORKLOADS["code"])
    other = load_measurements(code.bundle, code.dataset).acceptance.nearest
    return {
        RIGHT: right,
        "busy": replace(right, latency=busy(right.latency)),
        "quiet": replace(right, latency=busy(right.latency, power=-1)),
        "two graphs": replace(right, latency=two_graphs(right.latency)),
        "other text": replace(right, acceptance=other),
    }


class Stand:
    """A batcher and a clock for every arm."""

    def __init__(self, options: argparse.Namespace) -> None:
        under_test = subject(options)
        self.target = under_test.target
        pair = under_test.pair()
        self._latency = pair.latency
        self._on_profile = options.clock == "profile"
        self._bundle = under_test.twin().bundle if self._on_profile else pair.bundle
        self.texts = [pair.tokenizer.encode(text) for text in STORIES.test_texts]
        parts = policy_parts(pair.bundle, ServeConfig())
        self._switching = parts.switching_cost
        self._parts = tree_parts(parts, under_test)

    def _arm(self, size: int) -> tuple[Batcher, Clock]:
        config = ServeConfig(max_batch=size, kv_memory_bytes=PAGES * self._bundle.page_bytes)
        batcher = load_batcher(self._bundle, config)
        clock = ProfileClock(batcher, self._latency) if self._on_profile else OwnClock()
        return batcher, clock

    def run(self, size: int, num_steps: int) -> dict[str, Replay]:
        """Every profile and both policies over the same requests, `size` of them at a time."""
        policies = {
            f"{profile}, {name}": policy(parts, self._switching)
            for profile, parts in self._parts.items()
            for name, policy in POLICIES.items()
        }
        num_requests = size * num_steps * TOKENS_PER_STEP // TOKENS
        arrivals = [Arrival(0.0, self._prompt(place), TOKENS) for place in range(num_requests)]
        runs = in_turns({name: self._arm(size) for name in policies}, policies, arrivals)
        same_texts(runs)
        return runs

    def _prompt(self, place: int) -> list[int]:
        """A prompt of its own for every request: shared prefixes would favour the arm that evicts fewer."""
        start, text = divmod(place, len(self.texts))
        return self.texts[text][start : start + PROMPT_TOKENS]


def tok_per_s(run: Replay) -> float:
    """Tokens per second after LEARNING_STEPS, as long as requests wait, so every row has one."""
    full = [(at_s, sum(report.emitted)) for at_s, report in run.steps if report.waiting]
    (start_s, _), *counted = full[LEARNING_STEPS - 1 :]
    return sum(tokens for _, tokens in counted) / (counted[-1][0] - start_s)


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Every batch size; throughput is given as a share of the right profile's, learning."""
    stand = Stand(options)
    found: dict[str, dict[str, Any]] = {}
    for size in SIZES:
        runs = stand.run(size, options.steps)
        right = tok_per_s(runs[f"{RIGHT}, {LEARNS}"])
        share = {name: round(tok_per_s(run) / right, 4) for name, run in runs.items()}
        found[str(size)] = {
            profile: {name: share[f"{profile}, {name}"] for name in POLICIES} for profile in PROFILES
        }
        found[str(size)]["tok_per_s"] = round(right, 1)
        log(f"{size} requests: {found[str(size)]}")
    return {"target": stand.target.to_json(), "clock": options.clock, "sizes": found, "held": _held(found)}


def _held(found: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    wrong = [each[profile] for each in found.values() for profile in PROFILES if profile != RIGHT]
    return {
        "learns_a_wrong_profile": all(each[LEARNS] >= MIN_SHARE for each in wrong),
        "loses_nothing_with_the_right_one": all(
            each[RIGHT][COST_MODEL] <= 1 / MIN_SHARE_RIGHT for each in found.values()
        ),
        "a_cost_model_is_slower": any(each[COST_MODEL] < MIN_SHARE for each in wrong),
    }


def table(result: Mapping[str, Any]) -> str:
    """A row per batch size and profile."""
    names = "".join(f"{name:>12}" for name in POLICIES)
    lines = [f"{'requests':>8}  {'profile':<12}{names}   of the right profile's tokens/s"]
    for size, found in result["sizes"].items():
        for profile in PROFILES:
            shares = "".join(f"{found[profile][name]:>12.3f}" for name in POLICIES)
            lines.append(f"{size:>8}  {profile:<12}{shares}")
    lines.append(str(result["held"]))
    return "\n".join(lines)


def draw(figure: Figure, result: Mapping[str, Any]) -> None:
    """Bars of both policies by profile, a panel per batch size."""
    sizes = result["sizes"]
    for axes, (size, found) in zip(figure.subplots(1, len(sizes)), sizes.items(), strict=True):
        heights = {name: [found[profile][name] for profile in PROFILES] for name in POLICIES}
        bars(axes, [name.replace(" ", "\n") for name in PROFILES], heights, ylabel="of the right profile")
        axes.set_title(f"{size} requests")


CLAIM = Claim(
    name="wrong_profiles",
    doc=__doc__,
    options=(
        Option("--steps", "steps of the best arm, LEARNING_STEPS included", default=600, quick=400),
        Option("--clock", "what time is", default="profile", choices=("own", "profile")),
    ),
    measure=measure,
    table=table,
    draw=draw,
    variant=lambda options: ["own_clock"] if options.clock == "own" else [],
)

if __name__ == "__main__":
    CLAIM.main()
