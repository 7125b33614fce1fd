"""Plots: latency and speedup by width (Yggdrasil Fig. 5), acceptance, AAL, the depth predictor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from yggdrasil.pair import LoadedPair
from yggdrasil.policy.objective import speedup
from yggdrasil.report.drawing import load_matplotlib, save_figure

__all__ = ["measured_on", "plot_acceptance", "plot_latency", "plot_predictor"]

LINE_STYLES = ("-", "--", ":", "-.")  # of contexts
# the predictor has the colour of its temperature
RULE_COLOURS = {"fixed": "grey", "oracle": "black", "stopping": "tan"}


def measured_on(pair: LoadedPair) -> str:
    """One line for pictures: the pair, the machine of its profile, and the day of the measurement."""
    processor = str(pair.bundle.machine["cpu_flags"]).partition(" (")[0]
    threads = pair.latency.num_threads
    day = date.fromtimestamp(pair.bundle.profile_path.stat().st_mtime).isoformat()
    return f"pair {pair.bundle.name}, {processor}, {threads} thread{'s' * (threads != 1)}, {day}"


def _figure(pair: LoadedPair, title_left: str, title_right: str) -> tuple[Any, Any, Any]:
    figure = load_matplotlib().figure.Figure(figsize=(11, 4.8), layout="constrained")
    figure.suptitle(measured_on(pair), fontsize=9, color="dimgrey")
    left, right = figure.subplots(1, 2)
    for axes, title in ((left, title_left), (right, title_right)):
        axes.set_title(title, fontsize=11)
        axes.grid(color="gainsboro", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, left, right


def _bands(axes: Any, curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    """Draw curves that may coincide: each is thinner than the one before it, so none hides another."""
    for place, (label, (at, values)) in enumerate(curves.items()):
        width = 1.5 + 2.5 * (len(curves) - 1 - place)
        axes.plot(at, values, color=f"C{place}", linewidth=width, label=label, solid_capstyle="butt")


def _readable_ms(axes: Any, lowest: float, highest: float) -> None:
    """A logarithmic axis with 1, 2 and 5 in decimal numbers, with a space for the labels of points."""
    decades = range(math.floor(math.log10(lowest)), math.ceil(math.log10(highest)) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    axes.set_yscale("log")
    axes.set_ylim(lowest / 1.4, highest * 1.6)
    shown = [tick for tick in ticks if lowest / 1.4 <= tick <= highest * 1.6]
    axes.set_yticks(shown, [f"{tick:g}" for tick in shown])
    axes.set_yticks([], minor=True)


def _base_two(axes: Any, ticks: Iterable[int]) -> None:
    shown = sorted(set(ticks))
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [str(tick) for tick in shown], fontsize=8)
    axes.set_xticks([], minor=True)


def plot_latency(pair: LoadedPair, folder: Path) -> Path:
    """Plot milliseconds of a forward, and the speedup that Eq. 3 predicts, by width.

    The points of the shortest context have their values.
    """
    context = min(256, pair.bundle.max_context)
    figure, left, right = _figure(
        pair, "latency of a forward", f"predicted speedup (Eq. 3), greedy, context {context}, best depth"
    )
    _draw_latency(left, pair)
    _draw_speedup(right, pair, context)
    path = folder / f"{pair.bundle.name}-latency.png"
    save_figure(figure, path)
    return path


def _draw_latency(axes: Any, pair: LoadedPair) -> None:
    latency = pair.latency
    contexts = latency.verify.contexts
    sizes: set[int] = set()
    values: list[float] = []
    for name, curve, colour in (("target", latency.verify, "C0"), ("draft", latency.draft, "C1")):
        sizes.update(curve.sizes)
        for place, context in enumerate(contexts):
            ms = [curve.at(size, context) for size in curve.sizes]
            values += ms
            style = LINE_STYLES[place % len(LINE_STYLES)]
            label = f"{name}, context {context}"
            axes.plot(curve.sizes, ms, style, color=colour, marker="o", markersize=3, label=label)
            for size, at in zip(curve.sizes, ms, strict=True) if place == 0 else ():
                axes.annotate(
                    f"{at:.2g}",
                    (size, at),
                    (0, -10),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7,
                    color=colour,
                )
    _readable_ms(axes, min(values), max(values))
    _base_two(axes, sizes)
    axes.set(xlabel="tokens of the graph", ylabel="ms")
    axes.legend(fontsize=7)


def _draw_speedup(axes: Any, pair: LoadedPair, context: int) -> None:
    config = pair.bundle.config
    verify_widths = config.verify_widths
    gains = {
        width: [_best_speedup(pair, width, verify, context) for verify in verify_widths]
        for width in config.widths
    }
    _bands(axes, {f"W = {width}": (verify_widths, gains[width]) for width in reversed(config.widths)})
    gain, width, verify = max(
        (gain, -width, -verify)
        for width in config.widths
        for verify, gain in zip(verify_widths, gains[width], strict=True)
    )
    axes.plot(
        [-verify], [gain], "k*", markersize=10, label=f"best: {gain:.2f} with W = {-width}, K = {-verify}"
    )
    axes.axhline(1.0, color="dimgrey", linewidth=1, linestyle="--")
    _base_two(axes, verify_widths)
    axes.set(xlabel="verified width K", ylabel="speedup over plain decoding")
    axes.legend(fontsize=7)


def _best_speedup(pair: LoadedPair, width: int, verify: int, context: int) -> float:
    """Of all depths."""
    acceptance = pair.acceptance.nearest(0.0)
    return max(
        speedup(
            acceptance.expected_emitted(width, depth, verify),
            width=width,
            depth=depth,
            verify=verify,
            context_len=context,
            latency=pair.latency,
        )
        for depth in range(1, acceptance.max_depth + 1)
    )


def plot_acceptance(pair: LoadedPair, folder: Path) -> Path:
    """Plot calibrated acceptance by scaled path probability, and AAL by verified width."""
    figure, left, right = _figure(
        pair,
        f"calibration on {pair.dataset}: how often a node is accepted",
        "tokens a pass, deepest trees, temperature 0",
    )
    calibrated = {
        f"temperature {temperature}": ([math.exp(value) for value in each.log_probs], each.probabilities)
        for temperature, each in pair.acceptance.by_temperature.items()
    }
    _bands(left, calibrated)
    left.plot([0, 1], [0, 1], color="dimgrey", linewidth=0.8, linestyle=":", label="as the draft expects")
    left.set(xlabel="path probability of the draft, edges scaled", ylabel="share accepted")
    rows = {width: rows[-1] for width, rows in pair.acceptance.nearest(0.0).aal.items()}
    curves = {
        f"W = {width}: {rows[width][-1]:.2f} with all {len(rows[width])} nodes": (
            range(1, len(rows[width]) + 1),
            rows[width],
        )
        for width in sorted(rows, reverse=True)
    }
    _bands(right, curves)
    longest = max(map(len, rows.values()))
    _base_two(right, (2**power for power in range(longest.bit_length())))
    right.set(xlabel="verified width K", ylabel="emitted tokens per pass of the target")
    for axes in (left, right):
        axes.legend(fontsize=7)
    path = folder / f"{pair.bundle.name}-acceptance.png"
    save_figure(figure, path)
    return path


def plot_predictor(pair: LoadedPair, folder: Path) -> Path:
    """Plot held-out scores of the depth predictor by depth, and milliseconds per token by depth rule."""
    figure, left, right = _figure(
        pair,
        "Brier score of P(accepted >= d), held-out texts",
        "ms per token by depth rule, by the profile",
    )
    held_out = pair.depth.report["held_out"]
    for place, (temperature, found) in enumerate(held_out.items()):
        rows = found["depths"]
        colour = f"C{place}"
        depths = [row["depth"] for row in rows]
        left.plot(
            depths,
            [row["brier"] for row in rows],
            "o-",
            color=colour,
            markersize=3,
            label=f"predictor, temperature {temperature}",
        )
        left.plot(
            depths,
            [row["brier_constant"] for row in rows],
            ":",
            color=colour,
            label=f"constant, temperature {temperature}",
        )
        ms = found["decisions"]["ms_per_token"]
        gap = 0.8 / len(ms)
        for bar, (name, value) in enumerate(ms.items()):
            x = place + gap * (bar - (len(ms) - 1) / 2)
            right.bar(x, value, width=0.9 * gap, color=RULE_COLOURS.get(name, colour), alpha=0.8)
            is_used = name == found["decisions"]["best"]
            words = "used:\n" * is_used + f"{name}\n{value:.2f}"
            weight = "bold" if is_used else "normal"
            right.text(x, value, words, ha="center", va="bottom", fontsize=7, fontweight=weight)
    left.set(xlabel="depth d", ylabel="Brier score (less is better)", ylim=(0, 1.3 * left.get_ylim()[1]))
    left.legend(fontsize=7, loc="upper right", ncols=2)
    right.grid(visible=False)
    right.set_xticks(range(len(held_out)), [f"temperature {temperature}" for temperature in held_out])
    highest = max(
        value for found in held_out.values() for value in found["decisions"]["ms_per_token"].values()
    )
    right.set(ylabel="ms per token", ylim=(0, 1.15 * highest))
    path = folder / f"{pair.bundle.name}-{pair.dataset}-predictor.png"
    save_figure(figure, path)
    return path
