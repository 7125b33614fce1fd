"""An argument parser with readable errors."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

__all__ = ["Parser"]

OPTION = re.compile(r"--?[A-Za-z]\S*$")
SYNONYMS = {"--model": "--pair", "--name": "--pair"}  # of other tools, and of `ygg compile`
PHRASES = (  # argparse's words, ours
    (r"argument (?:\S+/)*(\S+): ", r"\1: "),
    (r"invalid int value: (.*)", r"\1 is not a whole number"),
    (r"invalid float value: (.*)", r"\1 is not a number"),
    (r"expected one argument", r"a value is missing"),
    (r"the following arguments are required: (.*)", r"an argument is missing: \1"),
)


class Parser(argparse.ArgumentParser):
    """Accepts options by their whole names only, and positional words anywhere among them.

    An unknown option is an error of its verb: it prints the verb's usage and suggests the nearest option.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            **{"formatter_class": argparse.RawDescriptionHelpFormatter, **settings, "allow_abbrev": False}
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse all arguments; unknown ones are an error."""
        found, left = super().parse_known_args(args, namespace)
        options = [word.partition("=")[0] for word in left if OPTION.match(word)]
        if options:
            word = SYNONYMS.get(options[0], options[0])
            self.error(
                f"there is no option {options[0]}{_nearest(word, list(self._option_string_actions))}"
            )
        if left and not isinstance(getattr(found, "prompt", None), list):
            hint = f"; did you mean --pair {left[0]}?" if "--pair" in self._option_string_actions else ""
            self.error(f"{' '.join(map(repr, left))} is one too many{hint}")
        if left:
            found.prompt = [*found.prompt, *left]  # argparse takes only the words before an option
        return found, []

    def error(self, message: str) -> NoReturn:
        """Print this parser's usage and one line; exit with 2."""
        for theirs, ours in PHRASES:
            message = re.sub(theirs, ours, message)
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            message = f"{value!r} is none of {', '.join(choices)}{_nearest(str(value), choices)}"
            raise argparse.ArgumentError(action, message)


def _nearest(word: str, known: Sequence[str]) -> str:
    longer = [each for each in known if word and each.startswith(word)]
    near = longer or get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
