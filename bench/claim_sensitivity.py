"""How much does time per token depend on width, depth and verified width, and how near the best fixed shape
is the default policy?

Paper: Fig. 13. Every combination of D, W and K of a coarse grid that is a tree (K at most 1 + W * D nodes)
on a few prompts, greedy, interleaved with plain decoding and the default policy. Refuted if the default
policy takes more than 1.1 times as long per token as the best cell, which was picked on the very prompts it
is judged on."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from bench.lib.arms import PLAIN_ARM, fixed_policy, plain_arm, policy_arm
from bench.lib.claim import Claim, Log, prompts_option, tokens_option
from bench.lib.harness import interleave
from bench.lib.subject import subject
from bench.lib.workloads import STORIES, beginnings
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.baselines import equal_growth
from yggdrasil.state import Shape

DEPTHS = (2, 4, 6, 8, 12, 16)
VERIFY_WIDTHS = (4, 8, 16, 32, 64)
OURS = "default policy"


def grid(pair: LoadedPair, *, coarse: bool) -> list[Shape]:
    """The valid cells."""
    config = pair.bundle.config
    depths = [depth for depth in DEPTHS if depth <= config.max_depth][:: 3 if coarse else 1]
    widths = [width for width in VERIFY_WIDTHS if width in config.verify_widths][:: 2 if coarse else 1]
    cells = [
        equal_growth(width, depth, verify)
        for verify in widths
        for width in config.widths
        for depth in depths
    ]
    return [cell for cell in cells if cell.verify is not None and cell.verify <= cell.num_nodes]


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """The grid on stories."""
    under_test = subject(options)
    pair = under_test.pair()
    log(under_test.target.statement)
    cells = {str(shape): shape for shape in grid(pair, coarse=options.quick)}
    arms = [plain_arm(pair, options.tokens), policy_arm(OURS, pair, pair.policy(), options.tokens)]
    arms += [
        policy_arm(name, pair, fixed_policy(pair, shape), options.tokens) for name, shape in cells.items()
    ]
    log(f"{len(cells)} shapes")
    rounds = interleave(arms, beginnings(STORIES.test_texts, pair, options.prompts), reference=PLAIN_ARM)
    tpot_ms = {name: round(median(rounds.later_tpots(name)), 3) for name in rounds.by_arm}
    best = min(cells, key=lambda name: tpot_ms[name])
    rows = [
        {"width": shape.width, "depth": shape.depth, "verify": shape.verify, "tpot_ms": tpot_ms[name]}
        for name, shape in cells.items()
    ]
    return {
        "target": under_test.target.to_json(),
        "cells": rows,
        "plain_ms": tpot_ms[PLAIN_ARM],
        "default_policy_ms": tpot_ms[OURS],
        "best_cell": best,
        "best_cell_ms": tpot_ms[best],
        "default_over_best_cell": round(tpot_ms[OURS] / tpot_ms[best], 3),
    }


def _axes_of(result: Mapping[str, Any]) -> tuple[list[int], ...]:
    """The depths, widths and verified widths of the grid."""
    return tuple(sorted({row[key] for row in result["cells"]}) for key in ("depth", "width", "verify"))


def _cell(result: Mapping[str, Any], depth: int, width: int, verify: int) -> float:
    return next(
        (
            row["tpot_ms"]
            for row in result["cells"]
            if (row["depth"], row["width"], row["verify"]) == (depth, width, verify)
        ),
        math.nan,
    )


def table(result: Mapping[str, Any]) -> str:
    """A block for every K: depths down, widths across."""
    depths, widths, verify_widths = _axes_of(result)
    lines = []
    for verify in verify_widths:
        lines.append(f"K = {verify:<4}" + "".join(f"{f'W = {width}':>9}" for width in widths))
        lines += [
            f"D = {depth:<4}" + "".join(f"{_cell(result, depth, width, verify):>9.2f}" for width in widths)
            for depth in depths
        ]
    best = f"best cell {result['best_cell']}: {result['best_cell_ms']:.2f}"
    return "\n".join(
        [
            *lines,
            f"ms per token; plain {result['plain_ms']:.2f}, default policy "
            f"{result['default_policy_ms']:.2f}, {best}",
        ]
    )


def draw(figure: Figure, result: Mapping[str, Any]) -> None:
    """A heat map for every K, one scale."""
    depths, widths, verify_widths = _axes_of(result)
    times = [row["tpot_ms"] for row in result["cells"]]
    grid_axes = figure.subplots(1, len(verify_widths), squeeze=False, sharey=True)[0]
    for axes, verify in zip(grid_axes, verify_widths, strict=True):
        values = [[_cell(result, depth, width, verify) for width in widths] for depth in depths]
        image = axes.imshow(
            values, vmin=min(times), vmax=max(times), cmap="viridis_r", aspect="auto", origin="lower"
        )
        for row, line in enumerate(values):
            for column, value in enumerate(line):
                if not math.isnan(value):
                    colour = "white" if value > (min(times) + max(times)) / 2 else "black"
                    axes.text(
                        column, row, f"{value:.1f}", ha="center", va="center", fontsize=6, color=colour
                    )
        axes.set_xticks(range(len(widths)), widths)
        axes.set_yticks(range(len(depths)), depths)
        axes.set(title=f"K = {verify}", xlabel="width W")
    grid_axes[0].set_ylabel("depth D")
    figure.colorbar(image, ax=list(grid_axes), label="ms per token")
    figure.suptitle(
        f"time per token by shape (paper: Fig. 13); plain {result['plain_ms']:.1f}, default policy "
        f"{result['default_policy_ms']:.1f}"
    )


CLAIM = Claim(
    name="sensitivity",
    doc=__doc__,
    options=(prompts_option(3), tokens_option(48)),
    measure=measure,
    table=table,
    draw=draw,
    size=(13, 3.5),
)

if __name__ == "__main__":
    CLAIM.main()
