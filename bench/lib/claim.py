"""What every claim's script does apart from measuring: options, an environment, a table, a JSON line, a
saved result and a drawing of it.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.lib.harness import environment, save_result
from bench.lib.subject import add_options
from yggdrasil.errors import YggError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Claim", "Log", "Option", "bars", "int_from", "prompts_option", "tokens_option"]

Log = Callable[[str], None]
Draw = Callable[["Figure", Mapping[str, Any]], None]
QUICK_PROMPTS = 2
QUICK_TOKENS = 16
SETTINGS = ("prompts", "tokens", "device")
FOLDERS = re.compile(r"[^\s=]*/")  # of a path, also after `--option=`


class Option:
    """An option of a claim's command line.

    Args:
        flag: Such as `--rounds`.
        help: What it does; the default is added.
        quick: Its value in a rehearsal; None where that leaves it alone.
        argument: What else `ArgumentParser.add_argument` takes; the type of a number is its default's.
    """

    def __init__(self, flag: str, help: str, *, quick: Any = None, **argument: Any) -> None:
        self.flag = flag
        self.quick = quick
        default = argument.get("default")
        shown = "" if default is None else " (default: %(default)s)"
        number = {"type": type(default)} if isinstance(default, int | float) else {}
        self.argument = {"help": help + shown, **number, **argument}

    @property
    def name(self) -> str:
        """In the parsed options."""
        return self.flag.removeprefix("--").replace("-", "_")


def int_from(minimum: int) -> Callable[[str], int]:
    """The type of an option that takes an integer of at least this."""

    def integer(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is not allowed; it must be at least {minimum}")
        return value

    return integer


def prompts_option(default: int, *, quick: int = QUICK_PROMPTS, minimum: int = 0) -> Option:
    """`--prompts`: held-out prompts per arm and workload."""
    return Option("--prompts", "held-out prompts", default=default, quick=quick, type=int_from(minimum))


def tokens_option(default: int, *, quick: int = QUICK_TOKENS, minimum: int = 0) -> Option:
    """`--tokens`: new tokens per prompt."""
    return Option("--tokens", "new tokens per prompt", default=default, quick=quick, type=int_from(minimum))


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim as a script.

    Args:
        name: Of the result's files.
        doc: The script's docstring: its first paragraph is the question.
        measure: Options to figures. They join the result's claim, question, arguments, settings and
            environment; a key that is both is the figures'.
        table: The result for a person.
        draw: The result as a figure; None for a claim without.
        size: Of the figure, in inches.
        options: The script's own, after `--json` and `--quick`.
        devices: Where the pair at real size can be measured; empty for a claim that does not take its
            options.
        rehearsal: What `--quick` leaves of the claim.
        variant: What options add to the name of the result's files, so that no result replaces one of
            another kind.
    """

    name: str
    doc: str | None
    measure: Callable[[argparse.Namespace, Log], dict[str, Any]]
    table: Callable[[Mapping[str, Any]], str]
    draw: Draw | None = None
    size: tuple[float, float] = (10, 4)
    options: Sequence[Option] = ()
    devices: Sequence[str] = ("cpu",)
    rehearsal: str = f"{QUICK_PROMPTS} prompts of {QUICK_TOKENS} tokens"
    variant: Callable[[argparse.Namespace], Sequence[str]] = lambda options: ()

    def main(self, arguments: Sequence[str] | None = None) -> dict[str, Any]:
        """Measure, report, save; the last line of standard output is the result as JSON.

        Returns the result. An error that the user can fix is one line on standard error and exit code 2.
        """
        given = sys.argv[1:] if arguments is None else arguments
        options = self.parse(given)
        log: Log = partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
        try:
            result = self._result(given, options, log)
        except YggError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        name = "_".join([self.name, *self.variant(options)])
        path = save_result(name, result, rehearsal=options.quick)
        log(self.table(result))
        log(f"written to {path}")
        if self.draw is not None:
            _save_figure(self.draw, result, path.with_suffix(".png"), self.size, log)
        print(json.dumps(result), flush=True)
        return result

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """The command line; a rehearsal has values of its own."""
        options = self._parser().parse_args(arguments)
        if options.quick:
            for option in self.options:
                if option.quick is not None:
                    setattr(options, option.name, option.quick)
        return options

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=f"bench.{Path(inspect.getfile(self.measure)).stem}",
            description=self.doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument(
            "--json", action="store_true", help="print nothing but the JSON document on standard output"
        )
        parser.add_argument(
            "--quick", action="store_true", help=f"a rehearsal: {self.rehearsal}, kept out of bench/results"
        )
        for option in self.options:
            parser.add_argument(option.flag, **option.argument)
        if self.devices:
            add_options(parser, devices=self.devices)
        return parser

    def _result(self, arguments: Sequence[str], options: argparse.Namespace, log: Log) -> dict[str, Any]:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        settings = {name: value for name, value in vars(options).items() if name in SETTINGS}
        return {
            "claim": self.name,
            "question": " ".join(str(self.doc).split("\n\n", 1)[0].split()),
            "arguments": [FOLDERS.sub("", argument) for argument in arguments],
            "settings": {**settings, "rehearsal": options.quick},
            "environment": environment(),
            **self.measure(options, log),
        }


def _save_figure(
    draw: Draw, result: Mapping[str, Any], path: Path, size: tuple[float, float], log: Log
) -> None:
    """Draw a result next to its JSON; without matplotlib there is only the JSON."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        log("no figure: matplotlib is not installed")
        return
    figure = Figure(figsize=size, layout="constrained")
    draw(figure, result)
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
