"""Does lending the draft's memory to KV pages raise throughput where pages bind, and cost nothing where
they do not?

A target of real size with a draft of a seventeenth of it, both function-preserving inflations, one batcher
in this process, and a budget of KV pages that binds before the batch is full. Text is sampled on a kind
that the models were not trained on, so that speculation stops paying in large batches.

- Rates (paper: Fig. 13): Poisson arrivals at fractions of what the budget was measured to bear without
  speculation and without that memory; Nightjar with elastic memory and without, one after another on the
  same arrivals, there and back again.
- Threshold (paper: Fig. 14): the same at the largest rate over tau_low.
- Operations (paper: Table 6): expansion, contraction with every lent page in use, the reload's dispatch,
  and the time until the draft is whole.

Refuted if at the largest rate throughput with elastic memory is below 1.05 times that without, if at the
smallest it is more than 1 % below, or if the texts differ.

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = head features.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch

from bench.lib.claim import Claim, Log, Option
from bench.lib.pair import bench_target, compiled_pair
from bench.lib.serving import Arrival, Replay, poisson, replay, same_texts
from bench.lib.subject import subject
from bench.lib.workloads import WORKLOADS
from yggdrasil.bundle import bundled_models
from yggdrasil.config import SamplingConfig, ServeConfig
from yggdrasil.layout import PAGE_LEN
from yggdrasil.policy.gamma.registry import PolicyParts, gamma_policy
from yggdrasil.serve.batcher import Batcher
from yggdrasil.serve.elastic import ElasticMemory, scarce_below
from yggdrasil.serve.load import load_batcher, policy_parts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAIR_NAME = "tinystories-scaled-both"
MIN_DRAFT_PARAMETERS = 15_000_000
FRACTIONS = (0.3, 0.8, 1.2, 1.6)
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)
OUTPUT_TOKENS = (64, 192)
MAX_BATCH = 48
GAMMA_MAX = 4
BASE_PAGES = 256
BURST = 64
OPERATIONS = 20
SAMPLING = SamplingConfig(temperature=1.0)
ARMS = ("elastic", "static")


class Stand:
    """A batcher with elastic memory over a pair, prompts, and what it bears without either."""

    def __init__(self, options: argparse.Namespace, log: Log) -> None:
        under_test = subject(options)
        self.target = under_test.target
        if options.llama_7b:
            pair = under_test.pair()
        else:
            draft = bench_target(bundled_models()[1].resolve(), options.draft_parameters)
            pair = compiled_pair(
                self.target.folder,
                draft.folder,
                name=PAIR_NAME,
                remeasure=options.remeasure,
                config=under_test.config,
            )
        workload = WORKLOADS["wiki"]
        self.texts = [
            pair.tokenizer.encode(text) for text in (*workload.test_texts, *workload.validation_texts)
        ]
        bundle = pair.bundle
        del pair
        config = ServeConfig(
            policy="off",
            gamma_max=GAMMA_MAX,
            max_batch=MAX_BATCH,
            kv_memory_bytes=options.pages * bundle.page_bytes,
        )
        self.batcher: Batcher = load_batcher(bundle, config)
        self.parts: PolicyParts = policy_parts(bundle, config)
        assert self.batcher.elastic is not None
        self.elastic: ElasticMemory = self.batcher.elastic
        burst = self.arrivals(rate=1000.0, seconds=1.0, seed=7)[:BURST]
        self.run("static", "fixed-2", burst[:8])  # a warm-up
        self.capacity = self.run("static", "off", burst).sustained
        log(
            f"{self.elastic.base_pages} pages and {self.elastic.draft_pages} in the draft's memory; "
            f"without speculation and without that memory {self.capacity:.2f} requests/s"
        )

    def arrivals(self, *, rate: float, seconds: float, seed: int) -> list[Arrival]:
        return poisson(self.texts, rate=rate, seconds=seconds, seed=seed, output_tokens=OUTPUT_TOKENS)

    def run(
        self,
        arm: str,
        policy: str,
        arrivals: Sequence[Arrival],
        *,
        share: float = ServeConfig().tau_low,
        seed: int = 0,
    ) -> Replay:
        """One arm over some arrivals; the draft is in when it begins and when it ends."""
        self.batcher.elastic = self.elastic if arm == "elastic" else None
        self.elastic.low_pages = scarce_below(share, self.elastic.base_pages)
        parts = PolicyParts(
            self.parts.gamma_max, self.parts.max_batch, self.parts.prior, self.parts.switching_cost, seed
        )
        done = replay(self.batcher, gamma_policy(policy, parts), arrivals, sampling=SAMPLING)
        assert self.batcher.step() is None
        assert self.elastic.is_draft_in
        return done


def measure_rates(stand: Stand, options: argparse.Namespace, log: Log) -> list[dict[str, Any]]:
    """Both arms at every rate, in turn."""
    rows = []
    for index, fraction in enumerate(FRACTIONS):
        arrivals = stand.arrivals(rate=fraction * stand.capacity, seconds=options.seconds, seed=index)
        rounds: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
        for turn in range(options.rounds):
            runs = {
                arm: stand.run(arm, "nightjar", arrivals, seed=turn)
                for arm in (ARMS if turn % 2 == 0 else reversed(ARMS))
            }
            same_texts(runs)
            for arm, run in runs.items():
                rounds[arm].append(figures(run))
        for arm in ARMS:
            rows.append(
                {
                    "fraction": fraction,
                    "rate": round(fraction * stand.capacity, 3),
                    "arm": arm,
                    "rounds": rounds[arm],
                }
            )
            log(line(f"{fraction:g} of capacity, {arm}", rounds[arm]))
    return rows


def measure_thresholds(stand: Stand, options: argparse.Namespace, log: Log) -> list[dict[str, Any]]:
    """The largest rate over tau_low, in turn."""
    arrivals = stand.arrivals(
        rate=FRACTIONS[-1] * stand.capacity, seconds=options.seconds, seed=len(FRACTIONS) - 1
    )
    rounds: dict[float, list[dict[str, Any]]] = {share: [] for share in SHARES}
    for turn in range(options.rounds):
        order = SHARES if turn % 2 == 0 else reversed(SHARES)
        runs = {
            f"tau_low {share:g}": stand.run("elastic", "nightjar", arrivals, share=share, seed=turn)
            for share in order
        }
        same_texts(runs)
        for share in SHARES:
            rounds[share].append(figures(runs[f"tau_low {share:g}"]))
    for share in SHARES:
        log(line(f"tau_low {share:g}", rounds[share]))
    return [{"tau_low": share, "rounds": rounds[share]} for share in SHARES]


def figures(run: Replay) -> dict[str, Any]:
    """The figures of a run, and how much of it the draft was away."""
    away = mean(not report.is_draft_in for _, report in run.steps)
    off = mean(report.gamma == 0 for _, report in run.steps if report.batch_size)
    return {**run.to_json(), "away_share": round(away, 4), "gamma_0_share": round(off, 4)}


def measure_operations(stand: Stand, log: Log) -> dict[str, Any]:
    """The cost of a change of tenant with every lent page in use, on an otherwise empty pool."""
    elastic = stand.elastic
    pool = stand.elastic.pool
    page_bytes = PAGE_LEN * stand.elastic.target.shape.token_bytes(
        stand.elastic.target.storage_PL2GSF.dtype
    )
    times: dict[str, list[float]] = {"expand": [], "contract": [], "dispatch reload": [], "reload": []}
    longest = pool.table_BP.shape[1]
    for _ in range(OPERATIONS):
        before = dict(elastic.trace.total_ms)
        elastic.expand_()
        rows = _take(pool, elastic.base_pages, longest, 0)
        lent = _take(pool, elastic.draft_pages, longest, rows)
        for row in range(rows):
            pool.release_(row)
        elastic.contract_()
        _synchronize(elastic)
        start = time.perf_counter()
        elastic.settle_()
        times["reload"].append((time.perf_counter() - start) * 1e3)
        for row in range(rows, lent):
            pool.release_(row)
        for name in ("expand", "contract", "dispatch reload"):
            times[name].append(elastic.trace.total_ms[name] - before.get(name, 0.0))
    pool.flush_()
    medians = {name.replace(" ", "_") + "_ms": round(median(values), 4) for name, values in times.items()}
    moved = elastic.draft_pages * page_bytes
    result = {
        **medians,
        "lent_share": round(elastic.draft_pages / (elastic.base_pages + elastic.draft_pages), 3),
        "moved_bytes": moved,
        "contract_gb_per_s": round(moved / medians["contract_ms"] / 1e6, 2),
        "draft_bytes": elastic.memory.num_bytes,
        "reload_gb_per_s": round(elastic.memory.num_bytes / max(1e-6, medians["reload_ms"]) / 1e6, 2),
    }
    log(", ".join(f"{name} {value}" for name, value in result.items()))
    return result


def _take(pool: Any, pages: int, longest: int, row: int) -> int:
    """Give rows from `row` on `pages` pages; returns the first row after them."""
    while pages:
        count = min(pages, longest)
        pool.extend_(row, count * PAGE_LEN)
        pages = pages - count
        row = row + 1
    return row


def _synchronize(elastic: ElasticMemory) -> None:
    if elastic.target.storage_PL2GSF.is_cuda:
        torch.cuda.current_stream().synchronize()


def line(name: str, rounds: Sequence[Mapping[str, Any]]) -> str:
    """One row for a person."""
    first = rounds[0]
    return (
        f"{name:<24} {mean(run['tok_per_s'] for run in rounds):>7.1f} tok/s  latency "
        f"{mean(run['latency_ms']['mean'] for run in rounds) / 1e3:>6.2f} s  "
        f"B {first['mean_batch']:>5.1f}  gamma {first['mean_gamma']:.2f}  draft away "
        f"{first['away_share']:.0%}  preemptions {first['preemptions']}"
    )


def verdict(rates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Throughput with elastic memory over that without, by rate: each turn, and their mean."""
    found = {}
    for fraction in FRACTIONS:
        ours, theirs = (
            [run["tok_per_s"] for run in row["rounds"]]
            for arm in ARMS
            for row in rates
            if row["fraction"] == fraction and row["arm"] == arm
        )
        found[str(fraction)] = {
            "throughput_over_static": round(mean(ours) / mean(theirs), 4),
            "turns": [round(one / other, 4) for one, other in zip(ours, theirs, strict=True)],
        }
    return found


def draw(figure: Figure, result: Mapping[str, Any]) -> None:
    """Throughput by rate and by threshold; the operations."""
    left, middle, right = figure.subplots(1, 3)
    for arm in ARMS:
        rows = [row for row in result["rates"] if row["arm"] == arm]
        left.plot(
            [row["rate"] for row in rows],
            [mean(run["tok_per_s"] for run in row["rounds"]) for row in rows],
            "o-",
            label=arm,
        )
    left.set(xlabel="requests/s", ylabel="tokens/s", title="throughput by rate (paper: Fig. 13)")
    left.legend()
    rows = result["thresholds"]
    middle.plot(
        [row["tau_low"] for row in rows],
        [mean(run["tok_per_s"] for run in row["rounds"]) for row in rows],
        "o-",
    )
    middle.set(
        xlabel="tau_low, share of the pages",
        ylabel="tokens/s",
        title="sensitivity to tau_low (paper: Fig. 14)",
    )
    names = ("expand_ms", "contract_ms", "dispatch_reload_ms", "reload_ms")
    right.bar_label(
        right.bar(names, [result["operations"][name] for name in names]), fmt="%.3g", fontsize=8
    )
    right.set(yscale="log", ylabel="ms", title="operations (paper: Table 6)")
    right.tick_params(axis="x", rotation=20)


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Operations, rates and thresholds, and the verdict on the rates."""
    stand = Stand(options, log)
    operations = measure_operations(stand, log)
    rates = measure_rates(stand, options, log)
    return {
        "settings": {name: value for name, value in vars(options).items() if name != "json"},
        "target": stand.target.to_json(),
        "base_pages": stand.elastic.base_pages,
        "room_pages": stand.elastic.draft_pages,
        "capacity_requests_per_s": round(stand.capacity, 3),
        "rates": rates,
        "thresholds": measure_thresholds(stand, options, log),
        "operations": operations,
        "verdict": verdict(rates),
    }


def table(result: Mapping[str, Any]) -> str:
    """The verdict; every run has had its line."""
    return json.dumps(result["verdict"], indent=1)


CLAIM = Claim(
    name="elastic",
    doc=__doc__,
    options=(
        Option("--seconds", "arrivals at every rate", default=12.0, quick=3.0),
        Option("--rounds", "turns of all arms", default=2, quick=1),
        Option("--pages", "KV pages of the budget, without the draft's memory", default=BASE_PAGES),
        Option("--draft-parameters", "inflate the draft to N", default=MIN_DRAFT_PARAMETERS, metavar="N"),
    ),
    measure=measure,
    table=table,
    draw=draw,
    size=(12, 4),
    devices=("cpu", "cuda"),
    rehearsal="one round of seconds",
)

if __name__ == "__main__":
    CLAIM.main()
