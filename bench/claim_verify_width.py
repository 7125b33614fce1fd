"""From which width on does verification stop being free, and how far is AAL from the speedup there?

Paper: Fig. 5 and Eq. 1-3. Measured now, sizes in turn: milliseconds of the target's and the draft's graphs
by width at three contexts. From them and the acceptance on calibration text, for every verified width K:
the naive speedup (Eq. 1: the largest AAL of any tree of K nodes), Eq. 3 of that very tree, and Eq. 3 of
the tree that Eq. 3 likes best at this K.

Refuted if T_verify does not grow with the width, so that the naive speedup is the speedup. Nothing is
decoded: `--prompts` and `--tokens` are of no consequence."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from bench.lib.claim import Claim, Log, prompts_option, tokens_option
from bench.lib.subject import subject
from yggdrasil.offline.latencies import curve_json, latency_curve
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.latency import LatencyModel
from yggdrasil.policy.objective import speedup
from yggdrasil.state import Shape

CONTEXTS = (64, 512, 1024)


def speedups(pair: LoadedPair, latency: LatencyModel, verify: int, context_len: int) -> dict[str, Any]:
    """Naive and true speedup of trees of `verify` nodes."""
    acceptance = pair.acceptance.nearest(0.0)
    shapes = [
        Shape(width, depth)
        for width in pair.bundle.config.widths
        for depth in range(1, acceptance.max_depth + 1)
    ]

    def aal(shape: Shape) -> float:
        return acceptance.expected_emitted(shape.width, shape.depth, verify)

    def gain(shape: Shape) -> float:
        num_verified = min(verify, shape.num_nodes)
        return speedup(
            aal(shape),
            width=shape.width,
            depth=shape.depth,
            verify=num_verified,
            context_len=context_len,
            latency=latency,
        )

    naive = max(shapes, key=aal)
    best = max(shapes, key=gain)
    return {
        "verify": verify,
        "naive": round(aal(naive), 3),
        "eq3_of_the_naive_choice": round(gain(naive), 3),
        "naive_choice": str(naive),
        "eq3": round(gain(best), 3),
        "choice": str(best),
    }


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Latencies and what follows from them."""
    under_test = subject(options)
    pair = under_test.pair()
    log(under_test.target.statement)
    contexts = [
        context
        for context in CONTEXTS
        if context + pair.bundle.config.prefill_chunk <= pair.bundle.max_context
    ][: 1 if options.quick else None]
    latency = replace(
        pair.latency,
        draft=latency_curve(pair.engine.draft, contexts),
        verify=latency_curve(pair.engine.target, contexts),
    )
    widths = pair.bundle.config.verify_widths
    return {
        "target": under_test.target.to_json(),
        "verify_ms": curve_json(latency.verify),
        "draft_ms": curve_json(latency.draft),
        "speedup": {
            str(context): [speedups(pair, latency, width, context) for width in widths]
            for context in contexts
        },
        "verify_widest_over_narrowest": {
            str(context): round(latency.verify.at(widths[-1], context) / latency.verify.at(1, context), 3)
            for context in contexts
        },
    }


def table(result: Mapping[str, Any]) -> str:
    """Latencies by width, then speedups by K."""
    lines = []
    for kind in ("verify_ms", "draft_ms"):
        lines.append(f"{kind:<14}" + "".join(f"{size:>9}" for size in result[kind]["sizes"]))
        lines += [
            f"context {context:<6}" + "".join(f"{ms:>9.3f}" for ms in row)
            for context, row in zip(result[kind]["contexts"], result[kind]["ms"], strict=True)
        ]
    for context, rows in result["speedup"].items():
        lines.append(f"context {context}: K, naive (AAL), Eq. 3 of that tree, Eq. 3 of the best tree")
        lines += [
            f"{row['verify']:>6} {row['naive']:>8.2f} {row['eq3_of_the_naive_choice']:>8.2f} "
            f"{row['eq3']:>8.2f}  {row['choice']}"
            for row in rows
        ]
    return "\n".join(lines)


def draw(figure: Figure, result: Mapping[str, Any]) -> None:
    """Latency against width on the left, speedup against K on the right."""
    left, right = figure.subplots(1, 2)
    for kind, style in (("verify_ms", "o-"), ("draft_ms", "s--")):
        for context, row in zip(result[kind]["contexts"], result[kind]["ms"], strict=True):
            left.plot(
                result[kind]["sizes"],
                row,
                style,
                markersize=3,
                label=f"{kind.removesuffix('_ms')}, context {context}",
            )
    left.set(title="latency of a forward (paper: Fig. 5a)", xlabel="tokens", ylabel="ms", yscale="log")
    for context, rows in result["speedup"].items():
        widths = [row["verify"] for row in rows]
        (line,) = right.plot(
            widths, [row["eq3"] for row in rows], "o-", markersize=3, label=f"Eq. 3, context {context}"
        )
        right.plot(widths, [row["eq3_of_the_naive_choice"] for row in rows], ":", color=line.get_color())
    right.plot([], [], "k:", label="Eq. 3 of the tree with the most AAL")
    right.plot(widths, [row["naive"] for row in rows], "k--", label="naive: AAL")
    right.set(
        title="speedup over plain decoding (paper: Fig. 5b)",
        xlabel="verified width K",
        ylabel="times faster",
    )
    for axes, ticks in ((left, result["verify_ms"]["sizes"]), (right, widths)):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.legend(fontsize=7)


CLAIM = Claim(
    name="verify_width",
    doc=__doc__,
    options=(prompts_option(0), tokens_option(0)),
    measure=measure,
    table=table,
    draw=draw,
)

if __name__ == "__main__":
    CLAIM.main()
