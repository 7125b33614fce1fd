"""Does the server's policy serve changing load at least as well as the best fixed speculative length, and
better than every other policy?

Every arm has a batcher of its own over the scaled pair in this process. All serve the same open-loop
arrivals, greedily, end of text ignored so that every policy writes the same. They take turns: the arm whose
clock is the earliest takes the next step, and its clock runs only during its own steps, so that each has
the machine to itself and a slow second is everybody's. (One after another they cannot be compared here: the
machine changes its pace by two within minutes.)

- Rates (paper: Figs. 9 and 15): Poisson arrivals at fractions of what decoding without speculation was
  measured to sustain a moment before; arms: every fixed length, none, trees (the server's policy), and
  nightjar (its chains).
- Trace (paper: Tables 4 and 5, Figs. 10 to 12): a part of a production trace whose rate more than doubles
  and falls again, compressed to less than a minute, its mean rate at `--load` of what a length of 2 was
  measured to sustain before the round. Arms that all keep up write all that arrives, and cannot differ in
  throughput, so the verdict shows what share of that the best fixed length wrote. Arms: all policies, and
  fixed lengths that verify the likeliest drafts by the rule of nightjar ("picks").
- Tuning: before the trace, TETRIS gets the length and share that write most on other texts at the same
  load.
- Switching: c_prefill by the profile's table next to what catching the draft up took.

Each run starts with a policy that knows nothing but the profile. Latencies count from a request's arrival.
Refuted if at some rate the throughput of trees is more than 2 % below the best fixed length's, if on the
trace at some load it is not above 1.05 times the best fixed length's (with and without picking) or not
above every baseline's, if at the largest rate it is more than 1 % below decoding without speculation, or if
a text differs between policies. Ratios are medians over the rounds, whose arrivals differ.

`--part trace` is the trace alone, in files of that name. `--clock profile` takes the small pair that
computes the same function and lets every step take what the profile of the scaled one predicts, into files
named `_profile`: no neighbour disturbs it at all. It cannot show what the profile leaves out (the host's
work for every row) or how a policy copes with a profile that is wrong (`claim_wrong_profiles`)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.lib.claim import Claim, Log, Option
from bench.lib.serving import (
    Arrival,
    Clock,
    OwnClock,
    ProfileClock,
    Replay,
    in_turns,
    poisson,
    same_texts,
    traced,
)
from bench.lib.subject import subject
from bench.lib.workloads import STORIES
from bench.make_trace import read_trace
from yggdrasil.config import GenerateConfig, ServeConfig
from yggdrasil.policy.gamma.nightjar import Nightjar
from yggdrasil.policy.gamma.protocol import BatchPolicy, Load
from yggdrasil.policy.gamma.registry import PolicyParts, batch_policy
from yggdrasil.policy.gamma.tetris import Tetris
from yggdrasil.serve.batcher import Batcher
from yggdrasil.serve.load import load_batcher, policy_parts
from yggdrasil.serve.request import Observer, Request

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CONFIG = ServeConfig(policy="off", max_batch=48, gamma_max=7)
OURS = "trees"
CHAINS = "nightjar"
OFF = "off"
FIXED = (OFF, "fixed-1", "fixed-2", "fixed-3", "fixed-5", "fixed-7")
PICKING = {f"fixed-{length} picks": length for length in (3, 5, 7)}
TETRIS = "tetris"
BASELINES = (
    *FIXED,
    *PICKING,
    "nightjar-printed",
    "banditspec",
    "dsd",
    TETRIS,
    "linucb",
    "lints",
    "ada-bingreedy",
    "tiers",
)
POLICIES = (*BASELINES, OURS, CHAINS)
TETRIS_LENGTHS = (3, 5, 7)
TETRIS_SHARES = (0.4, 0.6, 0.8)
FRACTIONS = (0.3, 0.8, 1.5)
CAPACITY_REQUESTS = 128
BIN_S = 3.0
# of every batcher: 48 rows of 192 tokens take 624, and what is measured of switching 16 of 520
NUM_PAGES = 700
OTHER_TEXTS = 17  # the prompts advance by this from round to round
PARTS = ("rates", "trace")
ROWS = {"rates": 1, "trace": 2}  # of drawings
LAGS = (32, 128, 512)
BATCH_SIZES = (1, 4, 16)
SWITCH_TURNS = 3
MOST_STEPS = 400

Rounds = Mapping[str, Sequence[Mapping[str, Any]]]
"""By policy the figures of every round."""


class PickingLength(Nightjar):
    """One speculative length; the likeliest drafts of the batch that fill a graph are verified, as by
    `Nightjar`."""

    length = 0

    def select(self, load: Load) -> int:
        return min(self.length, load.deepest)


class Stand:
    """A batcher and a clock for every policy, and prompts."""

    def __init__(self, options: argparse.Namespace, log: Log) -> None:
        under_test = subject(options)
        self.target = under_test.target.to_json()
        pair = under_test.pair()
        self.parts: PolicyParts = policy_parts(pair.bundle, CONFIG)
        self.texts = [pair.tokenizer.encode(text) for text in STORIES.test_texts]
        self.validation_texts = [pair.tokenizer.encode(text) for text in STORIES.validation_texts]
        self.tetris = Tetris(TETRIS_LENGTHS[0], share=TETRIS_SHARES[-1])
        self._latency = pair.latency
        self._on_profile = options.clock == "profile"
        self._bundle = under_test.twin().bundle if self._on_profile else pair.bundle
        self._log = log
        self._arms: dict[str, tuple[Batcher, Clock]] = {}

    def arm(self, policy: str) -> tuple[Batcher, Clock]:
        """The policy's batcher, its graphs warm, and the time that it lives in."""
        if policy not in self._arms:
            batcher = load_batcher(
                self._bundle, replace(CONFIG, kv_memory_bytes=NUM_PAGES * self._bundle.page_bytes)
            )
            for model in (batcher.target, batcher.draft):
                for size in model.sizes:
                    model.forward(model.meta(size))  # of nothing: a first call is slower
            self._arms[policy] = (
                batcher,
                ProfileClock(batcher, self._latency) if self._on_profile else OwnClock(),
            )
        return self._arms[policy]

    def _burst(self, num_requests: int) -> list[Arrival]:
        return poisson(self.texts, rate=1000.0, seconds=1.0, seed=7)[:num_requests]

    def capacity(self, policy: str) -> float:
        """Requests a second that a full batch sustains now."""
        sustained = self.run([policy], self._burst(CAPACITY_REQUESTS))[policy].sustained
        self._log(f"a full batch sustains {sustained:.2f} requests/s under {policy}")
        return sustained

    def run(self, names: Sequence[str], arrivals: Sequence[Arrival], seed: int = 0) -> dict[str, Replay]:
        """Policies that know nothing but the profile, over the same arrivals."""
        return self.in_turns({name: self._policy(name, seed) for name in names}, arrivals)

    def in_turns(
        self, policies: Mapping[str, BatchPolicy], arrivals: Sequence[Arrival]
    ) -> dict[str, Replay]:
        """The policies in turns over the same arrivals; they all write the same."""
        runs = in_turns({name: self.arm(name) for name in policies}, policies, arrivals)
        same_texts(runs)
        return runs

    def _policy(self, name: str, seed: int) -> BatchPolicy:
        """A new policy."""
        if name == TETRIS:
            return self.tetris
        if name not in PICKING:
            return batch_policy(name, replace(self.parts, seed=seed))
        policy = PickingLength(self.parts.prior, self.parts.switching_cost, gamma_max=PICKING[name])
        policy.length = PICKING[name]
        return policy


def measure_rates(stand: Stand, options: argparse.Namespace, log: Log) -> list[dict[str, Any]]:
    """Fixed lengths, trees and chains at every rate, `--rounds` times."""
    rows = []
    arms = (*FIXED, OURS, CHAINS)
    for index, fraction in enumerate(FRACTIONS):
        capacity = stand.capacity(OFF)
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
        for turn in range(options.rounds):
            arrivals = poisson(
                stand.texts,
                rate=fraction * capacity,
                seconds=options.seconds,
                seed=index + len(FRACTIONS) * turn,
            )
            for name, run in stand.run(arms, arrivals, seed=turn).items():
                rounds[name].append(run.to_json())
        for name, figures in rounds.items():
            rows.append(
                {
                    "fraction": fraction,
                    "rate": round(fraction * capacity, 3),
                    "policy": name,
                    **typical(figures),
                    "rounds": figures,
                }
            )
            log(line(rows[-1]))
    return rows


def typical(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of every figure over the rounds."""
    first = figures[0]
    return {
        key: typical([each[key] for each in figures])
        if isinstance(first[key], Mapping)
        else round(median(each[key] for each in figures), 4)
        for key in first
    }


def measure_trace(stand: Stand, load: float, options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """All policies on the trace at one load, `--rounds` times, each time with other prompts."""
    tuned = tune_tetris(stand, load, options, log)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in POLICIES}
    capacities = []
    offered = []
    timelines = {}
    for turn in range(options.rounds):
        capacities.append(capacity := stand.capacity("fixed-2"))
        texts = stand.texts[turn * OTHER_TEXTS :] + stand.texts[: turn * OTHER_TEXTS]
        arrivals = traced(texts, read_trace(), rate=load * capacity, seconds=options.trace_seconds)
        offered.append(sum(arrival.num_tokens for arrival in arrivals) / options.trace_seconds)
        for name, run in stand.run(POLICIES, arrivals, seed=turn).items():
            rounds[name].append(run.to_json())
            timelines[name] = run.timeline(BIN_S)
            log(
                line(
                    {
                        "policy": name,
                        "rate": round(len(arrivals) / options.trace_seconds, 2),
                        **rounds[name][-1],
                    }
                )
            )
    sizes = {"seconds": options.trace_seconds, "bin_s": BIN_S}
    measured = {"capacity_requests_per_s": capacities, "offered_tok_per_s": offered}
    return {
        "load": load,
        "tetris_tok_per_s": tuned,
        **{name: [round(each, 3) for each in found] for name, found in measured.items()},
        **sizes,
        "rounds": rounds,
        "timelines": timelines,
    }


def tune_tetris(stand: Stand, load: float, options: argparse.Namespace, log: Log) -> dict[str, float]:
    """Set the stand's TETRIS to the length and share that write most on validation texts at this load.

    Returns:
        Tokens per second by length and share.
    """
    candidates = {
        f"{length}, {share}": Tetris(length, share=share)
        for length in TETRIS_LENGTHS
        for share in TETRIS_SHARES
    }
    seconds = options.trace_seconds / 2
    rate = load * stand.capacity("fixed-2")
    arrivals = traced(stand.validation_texts, read_trace(), rate=rate, seconds=seconds)
    runs = stand.in_turns(candidates, arrivals)
    found = {name: round(run.throughput, 1) for name, run in runs.items()}
    best = max(found, key=lambda name: found[name])
    stand.tetris = candidates[best]
    log(f"TETRIS by length and share, tokens/s on validation texts: {found}; best {best}")
    return found


def measure_switching(stand: Stand, log: Log) -> list[dict[str, Any]]:
    """What it cost to bring the draft back over a lag, next to the prediction of the profile's table."""
    rows = []
    for lag in LAGS:
        for batch_size in BATCH_SIZES:
            measured = median(_catch_up_ms(stand, lag, batch_size, turn) for turn in range(SWITCH_TURNS))
            predicted = stand.parts.switching_cost(lag, batch_size) * 1e3
            rows.append(
                {
                    "lag": lag,
                    "batch_size": batch_size,
                    "predicted_ms": round(predicted, 3),
                    "measured_ms": round(measured, 3),
                }
            )
        log(
            f"c_prefill over a lag of {lag}: "
            + ", ".join(
                f"B {row['batch_size']} {row['predicted_ms']}/{row['measured_ms']} ms"
                for row in rows
                if row["lag"] == lag
            )
        )
    return rows


def _catch_up_ms(stand: Stand, lag: int, batch_size: int, turn: int) -> float:
    """Compute prompts of `lag` tokens without the draft, then let it catch up on all of them at once."""
    (batcher, _) = stand.arm(OURS)
    texts = stand.texts
    batcher.policy = batch_policy(OFF, stand.parts)
    batcher.observer = Observer()
    batcher.pool.flush_()
    stream = [token for text in texts[turn:] for token in text]
    tickets = [
        batcher.ticket(
            Request(
                prompt=stream[row * 7 :][:lag],
                config=GenerateConfig(max_new_tokens=MOST_STEPS, ignore_eos=True),
            )
        )
        for row in range(batch_size)
    ]
    for ticket in tickets:
        batcher.submit(ticket)
    while any(ticket.row is None or not ticket.row.is_prefilled for ticket in tickets):
        assert batcher.step() is not None, "a row ended before the last prompt was computed"
    batcher.policy = batch_policy("fixed-1", stand.parts)
    report = batcher.step()
    assert report is not None
    for ticket in tickets:
        batcher.cancel(ticket)
    return report.catch_up_ms


def line(row: Mapping[str, Any]) -> str:
    """One run for a person."""
    return (
        f"{row['rate']:>6} req/s  {row['policy']:<18} {row['tok_per_s']:>7.1f} tok/s  latency "
        f"{row['latency_ms']['mean']:>8.0f} mean "
        f"{row['latency_ms']['p95']:>8.0f} p95 ms  TTFT {row['ttft_ms']['mean']:>7.0f}  TPOT "
        f"{row['tpot_ms']['mean']:>6.1f}  "
        f"B {row['mean_batch']:>5.1f}  gamma {row['mean_gamma']:>4.2f}  host {row['host_share']:.1%}"
    )


def verdict_of_rates(rates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The goals at every rate with what was measured."""
    by_rate = {}
    for fraction in FRACTIONS:
        rounds = {row["policy"]: row["rounds"] for row in rates if row["fraction"] == fraction}
        by_rate[str(fraction)] = {
            **against(rounds, FIXED, "fixed"),
            "throughput_over_off": over(rounds, OFF, _throughput),
        }
    return by_rate


def verdict_of_trace(trace: Mapping[str, Any]) -> dict[str, Any]:
    """The goals on the trace with what was measured, and how much of what arrived the best fixed length
    could write meanwhile.
    """
    rounds = trace["rounds"]
    fixed = against(rounds, (*FIXED, *PICKING), "fixed")
    shares = [
        _throughput(run) / offered
        for run, offered in zip(rounds[fixed["best_fixed"]], trace["offered_tok_per_s"], strict=True)
    ]
    kept_up = {
        "best_fixed_of_offered": {
            "median": round(median(shares), 4),
            "rounds": [round(share, 4) for share in shares],
        }
    }
    chains = {"throughput_over_chains": over(rounds, CHAINS, _throughput)}
    return {**fixed, **kept_up, **against(rounds, BASELINES, "baseline"), **chains}


def against(rounds: Rounds, others: Sequence[str], kind: str) -> dict[str, Any]:
    """Trees next to the best of the others."""
    best = max(others, key=lambda name: median(map(_throughput, rounds[name])))
    quickest = min(others, key=lambda name: median(map(_latency, rounds[name])))
    return {
        f"best_{kind}": best,
        f"throughput_over_best_{kind}": over(rounds, best, _throughput),
        f"quickest_{kind}": quickest,
        f"latency_over_quickest_{kind}": over(rounds, quickest, _latency),
    }


def over(rounds: Rounds, other: str, figure: Callable[[Mapping[str, Any]], float]) -> dict[str, Any]:
    """The figure of trees over another policy's, in every round and in the median."""
    each = [
        round(figure(ours) / figure(theirs), 4)
        for ours, theirs in zip(rounds[OURS], rounds[other], strict=True)
    ]
    return {"median": round(median(each), 4), "rounds": each}


def _throughput(run: Mapping[str, Any]) -> float:
    return float(run["tok_per_s"])


def _latency(run: Mapping[str, Any]) -> float:
    return float(run["latency_ms"]["mean"])


def draw(figure: Figure, result: Mapping[str, Any]) -> None:
    """A row of drawings for the rates, two for the trace; those of them that were measured."""
    parts = [part for part in PARTS if part in result]
    num_rows = sum(ROWS[part] for part in parts)
    figure.set_size_inches(12, 3.7 * num_rows)
    rows: Iterator[Any] = iter(figure.subplots(num_rows, 2, squeeze=False))
    if "rates" in parts:
        _draw_rates(*next(rows), result["rates"])
    if "trace" in parts:
        _draw_trace(*next(rows), *next(rows), result["trace"][0])


def _draw_rates(left: Axes, right: Axes, rates: Sequence[Mapping[str, Any]]) -> None:
    for name in (*FIXED, OURS, CHAINS):
        rows = [row for row in rates if row["policy"] == name]
        at = [row["rate"] for row in rows]
        width = 2.5 if name == OURS else 1
        left.plot(at, [row["tok_per_s"] for row in rows], "o-", markersize=3, linewidth=width, label=name)
        right.plot(
            at,
            [row["latency_ms"]["mean"] / 1e3 for row in rows],
            "o-",
            markersize=3,
            linewidth=width,
            label=name,
        )
    left.set(xlabel="requests/s", ylabel="tokens/s", title="throughput by rate (paper: Figs. 9, 15)")
    right.set(xlabel="requests/s", ylabel="mean latency, s", yscale="log", title="latency by rate")
    left.legend(fontsize=7)


def _draw_trace(speed: Axes, length: Axes, load: Axes, totals: Axes, trace: Mapping[str, Any]) -> None:
    for name in (OURS, CHAINS, OFF, "fixed-3", "fixed-3 picks", "dsd", TETRIS):
        timeline = trace["timelines"][name]
        seconds = [place * trace["bin_s"] for place in range(len(timeline["tok_per_s"]))]
        width = 2.5 if name == OURS else 1
        speed.plot(seconds, timeline["tok_per_s"], linewidth=width, label=name)
        length.plot(seconds, timeline["gamma"], linewidth=width, label=name)
    ours = trace["timelines"][OURS]["running"]
    load.plot([place * trace["bin_s"] for place in range(len(ours))], ours, color="grey")
    speed.set(xlabel="s", ylabel="tokens/s", title="throughput over the trace (paper: Fig. 11)")
    length.set(xlabel="s", ylabel="mean gamma", title="speculative length over the trace")
    load.set(xlabel="s", ylabel="rows", title=f"running rows under {OURS} (load: paper Fig. 10)")
    speed.legend(fontsize=7)
    heights = [median(run["tok_per_s"] for run in trace["rounds"][name]) for name in POLICIES]
    totals.bar_label(
        totals.bar(POLICIES, heights, color=["C3" if name == OURS else "C0" for name in POLICIES]),
        fmt="%.0f",
        fontsize=7,
    )
    totals.set(ylabel="tokens/s", title="all policies on the trace (paper: Table 4, Fig. 12)")
    totals.tick_params(axis="x", rotation=75)


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """The parts that were asked for, and their verdicts."""
    stand = Stand(options, log)
    result: dict[str, Any] = {
        "settings": {name: value for name, value in vars(options).items() if name != "json"},
        "target": stand.target,
        "verdict": {},
    }
    if options.part != "trace":
        result["rates"] = measure_rates(stand, options, log)
        result["verdict"]["rates"] = verdict_of_rates(result["rates"])
    if options.part != "rates":
        result["trace"] = [measure_trace(stand, load, options, log) for load in options.load]
        result["verdict"]["trace"] = {
            str(trace["load"]): verdict_of_trace(trace) for trace in result["trace"]
        }
    if options.part is None and options.clock == "own":
        result["switching"] = measure_switching(stand, log)
    return result


def table(result: Mapping[str, Any]) -> str:
    """The verdict; every run has had its line."""
    return json.dumps(result["verdict"], indent=1)


def variant(options: argparse.Namespace) -> list[str]:
    """A part alone and the clock of the profile have files of their own."""
    part = [options.part] if options.part else []
    return [*part, "profile"] if options.clock == "profile" else part


CLAIM = Claim(
    name="serving",
    doc=__doc__,
    options=(
        Option("--seconds", "arrivals at every rate", default=12.0, quick=3.0),
        Option("--trace-seconds", "seconds that the trace is compressed to", default=25.0, quick=5.0),
        Option(
            "--load",
            "mean rates of the trace, in what a gamma of 2 sustains",
            default=[1.6],
            type=float,
            nargs="+",
        ),
        Option("--rounds", "runs of all policies", default=3, quick=1),
        Option("--part", "only this (default: both, and switching)", choices=PARTS),
        Option("--clock", "what time is", default="own", choices=("own", "profile")),
    ),
    measure=measure,
    table=table,
    draw=draw,
    devices=("cpu", "cuda"),
    rehearsal="one round of seconds",
    variant=variant,
)

if __name__ == "__main__":
    CLAIM.main()
