"""Plots: latency and speedup by width (Yggdrasil Fig. 5), acceptance, AAL, the depth predictor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from yggdrasil.pair import LoadedPair
from yggdrasil.policy.objective import speedup
from yggdrasil.report.drawing import load_matplotlib, save_figure

__all__ = ["plot_acceptance", "plot_latency", "plot_predictor"]

# the predictor has the colour of its temperature
RULE_COLOURS = {"fixed": "grey", "oracle": "black", "stopping": "tan"}


def _figure(title_left: str, title_right: str) -> tuple[Any, Any, Any]:
    figure = load_matplotlib().figure.Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.set_title(title_left)
    right.set_title(title_right)
    return figure, left, right


def plot_latency(pair: LoadedPair, folder: Path) -> Path:
    """Plot milliseconds of a forward, and the speedup that Eq. 3 predicts, by width."""
    figure, left, right = _figure("latency of a forward", "predicted speedup (Eq. 3), best depth")
    for context in pair.latency.verify.contexts:
        for name, curve, style in (
            ("target", pair.latency.verify, "o-"),
            ("draft", pair.latency.draft, "s--"),
        ):
            left.plot(
                curve.sizes,
                [curve.at(size, context) for size in curve.sizes],
                style,
                label=f"{name}, context {context}",
                markersize=3,
            )
    left.set(yscale="log", xlabel="tokens", ylabel="ms")
    acceptance = pair.acceptance.nearest(0.0)
    config = pair.bundle.config
    context = 256
    for width in config.widths:
        gains = []
        for verify in config.verify_widths:
            depths = range(1, acceptance.max_depth + 1)
            gains.append(
                max(
                    speedup(
                        acceptance.expected_emitted(width, d, verify),
                        width=width,
                        depth=d,
                        verify=verify,
                        context_len=context,
                        latency=pair.latency,
                    )
                    for d in depths
                )
            )
        right.plot(config.verify_widths, gains, "o-", label=f"W = {width}", markersize=3)
    right.axhline(1.0, color="grey", linewidth=0.8)
    right.set(xlabel="verified width K", ylabel="speedup over plain")
    for axes, ticks in ((left, pair.latency.verify.sizes), (right, config.verify_widths)):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        axes.legend(fontsize=7)
    path = folder / f"{pair.bundle.name}-latency.png"
    save_figure(figure, path)
    return path


def plot_acceptance(pair: LoadedPair, folder: Path) -> Path:
    """Plot calibrated acceptance by scaled path probability, and AAL by verified width."""
    figure, left, right = _figure("acceptance calibration", "AAL, deepest trees, temperature 0")
    for temperature, acceptance in pair.acceptance.by_temperature.items():
        left.plot(
            [2.718281828**value for value in acceptance.log_probs],
            acceptance.probabilities,
            label=f"temperature {temperature}",
        )
    left.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle=":")
    left.set(xlabel="path probability, edges scaled", ylabel="accepted")
    acceptance = pair.acceptance.nearest(0.0)
    for width, rows in acceptance.aal.items():
        right.plot(range(1, len(rows[-1]) + 1), rows[-1], label=f"W = {width}")
    right.set(xlabel="verified width K", ylabel="emitted tokens per target pass")
    for axes in (left, right):
        axes.legend(fontsize=7)
    path = folder / f"{pair.bundle.name}-acceptance.png"
    save_figure(figure, path)
    return path


def plot_predictor(pair: LoadedPair, folder: Path) -> Path:
    """Plot held-out scores of the depth predictor by depth, and milliseconds per token by depth rule."""
    figure, left, right = _figure(
        "Brier score of P(accepted >= d), held-out texts", "ms per token by depth rule"
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
            right.text(x, value, f"{name}\n{value:.2f}", ha="center", va="bottom", fontsize=7)
    left.set(xlabel="depth d", ylabel="Brier score (less is better)")
    left.legend(fontsize=7)
    right.set_xticks(range(len(held_out)), [f"temperature {temperature}" for temperature in held_out])
    highest = max(
        value for found in held_out.values() for value in found["decisions"]["ms_per_token"].values()
    )
    right.set(ylabel="ms per token, by the profile", ylim=(0, 1.15 * highest))
    path = folder / f"{pair.bundle.name}-{pair.dataset}-predictor.png"
    save_figure(figure, path)
    return path
