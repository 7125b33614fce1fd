"""Does the depth predictor predict better than a constant on text that it has not seen?

Statistics only, no clock. For two drafts of one target and every kind of text: a predictor is trained as
`ygg compile` does, on texts of that kind; then trees are drafted on other texts. The scaled pair computes
the bundled pair's function, so its texts, trees and labels are those of the bundled pair.

By depth d, for predictions of P(accepted >= d): Brier score, skill over the share on the training texts,
AUC, calibration error. A depth counts if at least 50 positions have the rarer outcome.

Also: how far labels from one pass of the draft agree with drafted trees (offline/forced.py).

Refuted where the Brier score is not below the constant's at a depth that counts, or where the AUC is below
0.70 at such a depth from 2 to 8."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bench.lib.claim import Claim, Log, Option, prompts_option
from bench.lib.subject import subject
from bench.lib.workloads import WORKLOADS, Workload, beginnings
from yggdrasil.offline.depth_evaluation import scores_by_depth
from yggdrasil.offline.depth_training import accepted_lengths, fit_predictor, held_out
from yggdrasil.offline.traces import Traces, further_passages
from yggdrasil.offline.tuning import collect, draft_embedding
from yggdrasil.pair import LoadedPair
from yggdrasil.report.progress import RichProgress
from yggdrasil.report.tables import MIN_EVENTS

DRAFTS = {"bundled and scaled": "bundled", "early draft": "early"}
TEST_PASSAGES = 3  # of every test text
PROGRESS = RichProgress()
MIN_AUC = 0.70
AUC_DEPTHS = range(2, 9)


def training_traces(pair: LoadedPair, texts: Sequence[str]) -> list[Traces]:
    """Traces at every calibration temperature, as `ygg compile` collects them."""
    prompts = beginnings(list(texts), pair, len(texts))
    return collect(pair.bundle, models_of(pair), prompts, further_passages(texts, pair.tokenizer), PROGRESS)


def judging_traces(pair: LoadedPair, texts: Sequence[str]) -> list[Traces]:
    """Traces of other texts, with drafted trees along several passages of each."""
    further = further_passages(texts, pair.tokenizer)[: (TEST_PASSAGES - 1) * len(texts)]
    prompts = [*beginnings(list(texts), pair, len(texts)), *(passage.tokens for passage in further)]
    return collect(pair.bundle, models_of(pair), prompts, [], PROGRESS)


def models_of(pair: LoadedPair) -> Any:
    """Target and draft."""
    return pair.engine.target, pair.engine.draft


def agreement(trace: Traces, num_tokens: int) -> dict[str, Any]:
    """Labels from one pass of the draft, compared with the drafted trees at the same positions.

    Args:
        num_tokens: Positions of a text that have a label.
    """
    num_texts = len(set(trace.text_N.tolist()))
    drafted = accepted_lengths(trace.deep)
    forced = trace.forced.length_N[: num_texts * num_tokens].reshape(num_texts, num_tokens)
    every = num_tokens * num_texts // len(drafted)
    same_places = forced[:, ::every].ravel()
    return {
        "positions": len(drafted),
        "equal": float((same_places == drafted).mean()),
        "mean_drafted": float(drafted.mean()),
        "mean_forced": float(same_places.mean()),
        "correlation": float(np.corrcoef(same_places, drafted)[0, 1]),
    }


def measure_text(pair: LoadedPair, workload: Workload, options: argparse.Namespace) -> dict[str, Any]:
    """Train on calibration texts, judge on others, by temperature."""
    depth = pair.bundle.config.max_depth
    training = training_traces(pair, workload.calibration_texts[: options.texts])
    tests = judging_traces(pair, workload.test_texts[: options.prompts])
    embedding_VE = draft_embedding(pair.bundle)
    judged = held_out(training, depth, embedding_VE)
    slopes = {each.trace.temperature: each.slope_D for each in judged}
    predictor = fit_predictor(training, depth, embedding_VE, slopes=slopes)
    found = {}
    for seen, unseen in zip(training, tests, strict=True):
        lengths = accepted_lengths(unseen.deep)
        share_D = (accepted_lengths(seen.deep)[:, None] >= np.arange(1, depth + 1)).mean(axis=0)
        predicted_ND = predictor.survivals(unseen.hidden_NE, unseen.root_N, unseen.temperature)
        found[f"{unseen.temperature:g}"] = {
            "training_passages": len(seen.forced.length_N) // pair.bundle.config.calibration_tokens,
            "passages": len(set(unseen.text_N.tolist())),
            "positions": len(lengths),
            "depths": scores_by_depth(lengths, predicted_ND, np.tile(share_D, (len(lengths), 1))),
            "forced_labels": agreement(seen, pair.bundle.config.calibration_tokens),
        }
    return found


def goals_of(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of one pair, text and temperature: the smallest skill and AUC at depths that count."""
    counted = [row for row in found["depths"] if row["rarer"] >= MIN_EVENTS]
    skills = [row["skill"] for row in counted]
    aucs = [row["auc"] for row in counted if row["depth"] in AUC_DEPTHS]
    return {
        "skill": {
            "wanted": "> 0",
            "measured": min(skills, default=None),
            "reached": min(skills, default=1) > 0,
        },
        "auc": {
            "wanted": MIN_AUC,
            "measured": min(aucs, default=None),
            "reached": min(aucs, default=1) >= MIN_AUC,
        },
    }


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Every draft, every kind of text, every calibration temperature."""
    pairs: dict[str, Any] = {}
    goals = {}
    for name, draft in DRAFTS.items():
        pair = subject(options, draft).twin()
        pairs[name] = {}
        for text, workload in WORKLOADS.items():
            pairs[name][text] = measure_text(pair, workload, options)
            for temperature, found in pairs[name][text].items():
                of_place = goals_of(found)
                log(f"{name}, {text}, temperature {temperature}: {of_place}")
                for goal, each in of_place.items():
                    goals[f"{goal}: {name}, {text}, temperature {temperature}"] = each
    return {"min_events": MIN_EVENTS, "pairs": pairs, "goals": goals}


def places(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Every pair, text and temperature."""
    return [
        (f"{name}, {text}, T = {temperature}", found)
        for name, texts in result["pairs"].items()
        for text, temperatures in texts.items()
        for temperature, found in temperatures.items()
    ]


def table(result: Mapping[str, Any]) -> str:
    """Skill over the constant and AUC by depth; depths that do not count in brackets."""
    shown = (1, 2, 3, 4, 6, 8, 12, 16)
    lines = [f"{'skill, AUC at depth':<40}" + "".join(f"{depth:>13}" for depth in shown)]
    for name, found in places(result):
        cells = ""
        for row in found["depths"]:
            if row["depth"] in shown:
                auc = "-" if row["auc"] is None else f"{row['auc']:.2f}"
                cell = f"{row['skill']:+.2f} {auc}"
                cells += f"{cell if row['rarer'] >= result['min_events'] else f'({cell})':>13}"
        labels = found["forced_labels"]
        lines.append(f"{name:<40}{cells}   forced labels {labels['equal']:.0%} equal")
    missed = [name for name, goal in result["goals"].items() if not goal["reached"]]
    lines += [f"missed {len(missed)} of {len(result['goals'])}", *missed]
    return "\n".join(lines)


def draw(figure: Figure, result: Mapping[str, Any]) -> None:
    """Skill and AUC by depth, at the depths that count."""
    left, right = figure.subplots(1, 2)
    for name, found in places(result):
        rows = [row for row in found["depths"] if row["rarer"] >= result["min_events"]]
        depths = [row["depth"] for row in rows]
        style = "o-" if name.endswith("T = 0") else "x:"
        left.plot(depths, [row["skill"] for row in rows], style, markersize=3, label=name)
        right.plot(depths, [row["auc"] for row in rows], style, markersize=3)
    left.axhline(0, color="black", linewidth=0.8)
    right.axhline(MIN_AUC, color="black", linewidth=0.8)
    left.set(xlabel="depth d", ylabel="Brier skill over the constant")
    right.set(xlabel="depth d", ylabel="AUC")
    left.legend(fontsize=5)


CLAIM = Claim(
    name="predictor",
    doc=__doc__,
    options=(Option("--texts", "calibration texts to train on", quick=4, default=64), prompts_option(60)),
    measure=measure,
    table=table,
    draw=draw,
    rehearsal="4 calibration texts and 2 prompts",
)

if __name__ == "__main__":
    CLAIM.main()
