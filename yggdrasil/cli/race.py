"""`ygg race`: plain and speculative decoding of one prompt, side by side on one clock."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from yggdrasil.cli.heap import frozen_heap
from yggdrasil.cli.prompt import prompt_of
from yggdrasil.cli.request import add_pair, add_request, load_chosen_pair, note_busy, request_config
from yggdrasil.cli.terminal import console, is_terminal
from yggdrasil.errors import ConfigError

__all__ = ["add_parser", "run"]

DESCRIPTION = """\
Decode one prompt without speculation and with it, one after the other, then replay both side by side in
slow motion. A recording that takes longer than a second is shown as it comes. What a step of speculation
brought at once has one colour. The last line compares the two runs by their own clocks. A file or a pipe
gets the figures alone.

  ygg race "Once upon a time"                       the bundled pair
  ygg race --slow 50 -n 100 "Once upon a time"      50 times slower than it was
  ygg race --pair mine --temperature 0.8 "Hello"    sampled: the same text, too
"""


def add_parser(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "race",
        help="see the speedup: decode without speculation and with it, side by side",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "prompt", nargs="*", default=[], help='the text to continue, or "-" for standard input'
    )
    parser.add_argument(
        "--slow",
        type=float,
        metavar="N",
        help="replay N times slower than it was (default: slow enough to follow)",
    )
    add_pair(parser)
    add_request(parser)
    parser.set_defaults(run=run, plain=False)


def run(options: argparse.Namespace) -> None:
    """Record both, replay them on a terminal, and compare."""
    slow = options.slow
    if slow is not None and not (math.isfinite(slow) and slow > 0):
        raise ConfigError("slow", slow, "a finite number above 0")
    config = request_config(options)
    prompt = prompt_of(options.prompt, "race")
    pair = load_chosen_pair(options, config, prompt)
    from yggdrasil.engine import check_request  # after the pair: torch is imported by then
    from yggdrasil.report.race import drawn_live, record_race, replay

    config = request_config(options, pair)
    tokens = pair.tokens(prompt)
    check_request(len(tokens), config, pair.engine.max_context)
    if is_terminal(sys.stdout):
        screen = console(sys.stdout)
        with drawn_live(screen, prompt) as watch, frozen_heap():
            race = record_race(pair, tokens, config, watch)
        replay(race, screen, prompt, slow or race.default_slow)
    else:
        with frozen_heap():
            race = record_race(pair, tokens, config)
    print(race.summary())
    note_busy("race", race.speculative)
