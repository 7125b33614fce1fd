"""What every claim's script does apart from measuring: options, a table, a JSON line, a saved result and a
drawing of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.lib.harness import environment, save_result
from bench.lib.subject import add_options

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Claim", "Log", "bars", "log_of", "report", "save_figure", "script_parser"]

Log = Callable[[str], None]
QUICK_PROMPTS = 2
QUICK_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim as a script.

    Args:
        name: Of the result's files.
        doc: The script's docstring: its first paragraph is the question.
        prompts: Held-out prompts per arm and workload.
        tokens: New tokens per prompt.
        measure: Options to figures.
        table: The result for a person.
        draw: The result as a figure.
        size: Of the figure, in inches.
        devices: Where it can be measured.
    """

    name: str
    doc: str | None
    prompts: int
    tokens: int
    measure: Callable[[argparse.Namespace, Log], dict[str, Any]]
    table: Callable[[Mapping[str, Any]], str]
    draw: Callable[[Figure, Mapping[str, Any]], None]
    size: tuple[float, float] = (10, 4)
    devices: tuple[str, ...] = ("cpu",)

    def main(self) -> None:
        """Measure and report; the last line of standard output is the result as JSON."""
        import transformers

        options = self._parser().parse_args()
        if options.quick:
            options.prompts = QUICK_PROMPTS
            options.tokens = QUICK_TOKENS
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        log = log_of(options)
        settings = {
            "prompts": options.prompts,
            "tokens": options.tokens,
            "rehearsal": options.quick,
            "device": options.device,
        }
        question = " ".join(str(self.doc).split("\n\n", 1)[0].split())
        result = {
            "claim": self.name,
            "question": question,
            "settings": settings,
            "environment": environment(),
            **self.measure(options, log),
        }
        log(self.table(result))
        path = save_result(self.name, result, rehearsal=options.quick)
        log(f"written to {path}")
        save_figure(lambda figure: self.draw(figure, result), path.with_suffix(".png"), self.size, log)
        print(json.dumps(result), flush=True)

    def _parser(self) -> argparse.ArgumentParser:
        parser = script_parser(self.name, self.doc, f"{QUICK_PROMPTS} prompts of {QUICK_TOKENS} tokens")
        parser.add_argument(
            "--prompts", type=int, default=self.prompts, help="held-out prompts (default: %(default)s)"
        )
        parser.add_argument(
            "--tokens", type=int, default=self.tokens, help="new tokens per prompt (default: %(default)s)"
        )
        add_options(parser, devices=self.devices)
        return parser


def script_parser(name: str, doc: str | None, rehearsal: str) -> argparse.ArgumentParser:
    """A script's command line with what all of them take.

    Args:
        name: Of the claim.
        doc: The script's docstring.
        rehearsal: What `--quick` leaves of the claim.
    """
    parser = argparse.ArgumentParser(
        prog=f"bench.claim_{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print nothing but the JSON document on standard output"
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"a rehearsal: {rehearsal}, kept out of bench/results"
    )
    return parser


def log_of(options: argparse.Namespace) -> Log:
    """Where a script talks: standard error when standard output is for the JSON document alone."""
    return partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)


def report(name: str, result: Mapping[str, Any], options: argparse.Namespace, log: Log) -> None:
    """Save the result under its name, and print it as the last line of standard output."""
    log(f"written to {save_result(name, result, rehearsal=options.quick)}")
    print(json.dumps(result), flush=True)


def save_figure(draw: Callable[[Figure], None], path: Path, size: tuple[float, float], log: Log) -> None:
    """Draw a result next to its JSON; without matplotlib there is only the JSON."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        log("no figure: matplotlib is not installed")
        return
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    figure.savefig(path, dpi=130)
    log(f"drawn in {path.name}")


def bars(axes: Any, groups: Sequence[str], heights: Mapping[str, Sequence[float]], *, ylabel: str) -> None:
    """Grouped bars: a group for every name, a bar in it for every series, with its height as text."""
    width = 0.8 / len(heights)
    for index, (series, values) in enumerate(heights.items()):
        places = [group + (index - (len(heights) - 1) / 2) * width for group in range(len(groups))]
        axes.bar_label(
            axes.bar(places, values, width, label=series), fmt="%.2f", fontsize=5, rotation=90, padding=2
        )
    axes.set_xticks(range(len(groups)), groups)
    axes.margins(y=0.15)
    axes.set_ylabel(ylabel)
    axes.legend(fontsize=7)
