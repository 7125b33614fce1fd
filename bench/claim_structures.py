"""Which tree accepts the most tokens for a verified width, and which has the largest speedup by Eq. 3?

Paper: Fig. 11. For every verified width K and every structure: AAL, and the speedup by Eq. 3 under the
scaled pair's profile, on held-out wiki text and stories, greedy. Structures: sequence (as deep as K and the
menu allow), binary and ternary trees cut to K nodes, Sequoia of exactly K nodes at its best depth, OPT-Tree
with K as its budget, the equal-growth tree. Depth, width and stopping are chosen by Eq. 3: OPT-Tree's on
validation text, the equal-growth tree's and Sequoia's on calibration text. "By AAL" are Sequoia's tree and
the equal-growth tree of the largest AAL instead.

No clock: tokens are counted on the bundled pair, whose function the scaled target computes; every text is
asserted to be plain decoding's. Refuted if at its best K another structure's speedup is above the
equal-growth tree's at its best."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bench.lib.claim import Claim, Log, prompts_option, tokens_option
from bench.lib.counting import Counter, candidates
from bench.lib.subject import subject
from bench.lib.workloads import WORKLOADS, Workload, beginnings
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.baselines import equal_growth, k_ary, sequence, sequoia, sequoia_latency
from yggdrasil.policy.objective import speedup
from yggdrasil.state import Shape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS = "equal growth"
MEASURED_ON = ("wiki", "stories")
TUNING_PROMPTS = 4


def best_equal_growth(pair: LoadedPair, verify: int, context_len: int, *, by_aal: bool = False) -> Shape:
    """W and D that Eq. 3 likes best for K nodes, on calibration text; or AAL."""
    acceptance = pair.acceptance.nearest(0.0)
    shapes = [
        equal_growth(width, depth, verify)
        for width in pair.bundle.config.widths
        for depth in range(1, acceptance.max_depth + 1)
        if 1 + width * depth >= verify
    ]

    def gain(shape: Shape) -> float:
        aal = acceptance.expected_emitted(shape.width, shape.depth, verify)
        return (
            aal
            if by_aal
            else speedup(
                aal,
                width=shape.width,
                depth=shape.depth,
                verify=verify,
                context_len=context_len,
                latency=pair.latency,
            )
        )

    return max(shapes, key=gain)


def structures(pair: LoadedPair, tuning: Counter, verify: int, context_len: int) -> dict[str, Shape]:
    """One shape of every kind for K nodes."""
    config = pair.bundle.config
    opt_trees = candidates("OPT-Tree", pair, verify=verify)
    by_rank = pair.acceptance.nearest(0.0).by_rank
    return {
        "sequence": sequence(min(verify - 1, config.max_depth)),
        "binary": k_ary(2, config.max_depth, num_nodes=verify),
        "ternary": k_ary(3, config.max_depth, num_nodes=verify),
        "Sequoia": sequoia_latency(by_rank, config.max_depth, pair.latency, (verify,), context_len),
        "OPT-Tree": opt_trees[tuning.best(opt_trees)],
        "Sequoia, by AAL": sequoia(by_rank, verify, config.max_depth),
        OURS: best_equal_growth(pair, verify, context_len),
        f"{OURS}, by AAL": best_equal_growth(pair, verify, context_len, by_aal=True),
    }


def measure_workload(options: argparse.Namespace, workload: Workload, log: Log) -> list[dict[str, Any]]:
    """Every structure at every K on one kind of text."""
    under_test = subject(options)
    pair = under_test.pair(workload)
    twin = under_test.twin(workload)
    tuning_prompts = beginnings(workload.validation_texts, pair, min(TUNING_PROMPTS, options.prompts))
    tuning = Counter(twin, pair.latency, tuning_prompts, num_tokens=options.tokens)
    counter = Counter(
        twin,
        pair.latency,
        beginnings(workload.test_texts, pair, options.prompts),
        num_tokens=options.tokens,
    )
    rows = []
    for verify in pair.bundle.config.verify_widths:
        for name, shape in structures(pair, tuning, verify, options.tokens).items():
            rows.append(
                {"verify": verify, "structure": name, "shape": str(shape), **counter.count(shape).to_json()}
            )
        log(
            f"{workload}, K = {verify}: "
            + ", ".join(f"{row['structure']} {row['aal']:.2f}" for row in rows if row["verify"] == verify)
        )
    return rows


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Both kinds of text."""
    found = {name: measure_workload(options, WORKLOADS[name], log) for name in MEASURED_ON}
    return {
        "target": subject(options).target.to_json(),
        "workloads": found,
        "best_speedup_eq3": {name: best_speedups(rows) for name, rows in found.items()},
    }


def best_speedups(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of every structure, at the K that suits it best."""
    return {
        name: max(row["speedup_eq3"] for row in rows if row["structure"] == name)
        for name in dict.fromkeys(row["structure"] for row in rows)
    }


def table(result: Mapping[str, Any]) -> str:
    """AAL and speedup, K by K."""
    lines = []
    for workload, rows in result["workloads"].items():
        names = list(result["best_speedup_eq3"][workload])
        lines.append(f"{workload}: AAL / speedup by Eq. 3" + "".join(f"{name:>16}" for name in names))
        for verify in dict.fromkeys(row["verify"] for row in rows):
            cells = [
                f"{row['aal']:.2f} / {row['speedup_eq3']:.2f}" for row in rows if row["verify"] == verify
            ]
            lines.append(
                f"{f'K = {verify}':<{len(workload) + 26}}" + "".join(f"{cell:>16}" for cell in cells)
            )
        lines.append(f"best of each: {result['best_speedup_eq3'][workload]}")
    return "\n".join(lines)


def draw(figure: Figure, result: Mapping[str, Any]) -> None:
    """AAL above, speedup below, a column for every kind of text."""
    grid = figure.subplots(2, len(result["workloads"]), squeeze=False, sharex=True)
    for column, (workload, rows) in enumerate(result["workloads"].items()):
        for line, (key, label) in enumerate((("aal", "AAL"), ("speedup_eq3", "speedup by Eq. 3"))):
            axes = grid[line][column]
            for name in result["best_speedup_eq3"][workload]:
                mine = [row for row in rows if row["structure"] == name]
                axes.plot(
                    [row["verify"] for row in mine],
                    [row[key] for row in mine],
                    "o-",
                    markersize=3,
                    label=name,
                    linewidth=2 if name.startswith(OURS) else 1,
                )
            axes.set(ylabel=label, title=f"{workload} (paper: Fig. 11{'ab'[line]})")
            axes.set_xlabel("verified nodes K")
        grid[0][column].legend(fontsize=7)


CLAIM = Claim(
    name="structures",
    doc=__doc__,
    options=(prompts_option(10), tokens_option(64)),
    measure=measure,
    table=table,
    draw=draw,
    size=(10, 7),
    devices=("cpu", "cuda"),
)

if __name__ == "__main__":
    CLAIM.main()
