"""`ygg generate`: stream text to standard output, everything else to standard error."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from yggdrasil.cli.heap import frozen_heap
from yggdrasil.cli.prompt import prompt_of
from yggdrasil.cli.request import (
    add_grammars,
    add_pair,
    add_request,
    load_chosen_pair,
    note_busy,
    request_config,
)
from yggdrasil.cli.terminal import console, is_terminal, print_dim
from yggdrasil.errors import ConfigError

if TYPE_CHECKING:
    from yggdrasil.report.run import Run

__all__ = ["add_parser", "run"]

DESCRIPTION = """\
Continue a prompt with speculation. The text is what the target alone would write; --plain shows that.
The prompt is every word that is not an option; "-" reads it from standard input. A terminal also shows
the prompt, dimmed, and the speed in a last line.

  ygg generate "Once upon a time"                   the bundled pair
  ygg generate --live "Once upon a time"            every step's tree, as it grows
  ygg generate --temperature 0.8 --seed 7 "Hello"   sampled; the same seed writes the same text
  ygg generate --pair mine --chat "Who are you?"    a question, in the model's own chat template
  ygg generate --json - < story.txt > answer.json   for a program

A pair compiled for several GPUs: torchrun --nproc-per-node 2 -m yggdrasil generate ...
"""


def add_parser(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "generate",
        help="write text",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "prompt", nargs="*", default=[], help='the text to continue, or "-" for standard input'
    )
    add_pair(parser)
    add_request(parser)
    add_grammars(parser)
    parser.add_argument(
        "--chat", action="store_true", help="answer the prompt as a user's message (`ygg chat` converses)"
    )
    parser.add_argument("--plain", action="store_true", help="decode without speculation")
    parser.add_argument(
        "--no-guard",
        dest="guard",
        action="store_false",
        help="speculate also where it is measured to be slower, for measurements",
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="draw the tree of every step next to the text, in slow motion; text alone off a terminal",
    )
    parser.add_argument("--quiet", action="store_true", help="write the text alone on a terminal, too")
    parser.add_argument(
        "--stats",
        action="store_true",
        help="print tokens per pass, milliseconds per stage, and the speedup that the profile predicts",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--show-tree",
        action="store_true",
        help="print the verified tree of every step, accepted nodes starred",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Generate once."""
    start = time.perf_counter()
    _check_output(options)
    config = request_config(options)
    prompt = prompt_of(options.prompt)
    pair = load_chosen_pair(options, config, prompt)
    from yggdrasil.engine import check_request  # after the pair: torch is imported by then
    from yggdrasil.report.run import Run

    config = request_config(options, pair)
    if options.chat:
        tokens = pair.chat_tokens([{"role": "user", "content": prompt}])
        config = replace(config, stop=(*config.stop, *pair.template.stops))
    else:
        tokens = pair.tokens(prompt)
    check_request(len(tokens), config, pair.engine.max_context)
    outcome = Run(pair, tokens, config, start=start, guard=options.guard)
    with frozen_heap():
        _write(outcome, options, prompt)
    _report(outcome, options)


def _check_output(options: argparse.Namespace) -> None:
    """Refuse forms of output that exclude one another."""
    for other in ("json", "show_tree"):
        if options.live and getattr(options, other):
            raise ConfigError("live", True, f"left out together with --{other.replace('_', '-')}")


def _write(outcome: Run, options: argparse.Namespace, prompt: str) -> None:
    """Decode, and write the text in the form that the options ask for."""
    on_terminal = is_terminal(sys.stdout) and not options.json
    if options.live and on_terminal:
        from yggdrasil.report.live import draw_live

        draw_live(outcome, console(sys.stdout), prompt)
    if on_terminal and not options.quiet and not options.chat:
        print_dim(prompt, sys.stdout, end="")
    if outcome.text:  # drawn already; the drawing is gone
        print(outcome.text, end="")
    _stream(outcome, options)


def _stream(outcome: Run, options: argparse.Namespace) -> None:
    tokenizer = outcome.pair.tokenizer
    for text, result in outcome.steps():
        if not options.json:
            print(text, end="", flush=True)
        if options.show_tree and result is not None:
            labels = [tokenizer.token_text(token) for token in result.tree.token_N.tolist()]
            print(f"\n{result.tree.render(labels, result.path)}", file=sys.stderr)
    if not options.json:
        print()


def _report(outcome: Run, options: argparse.Namespace) -> None:
    """Print what the options ask for after the text, and whether the machine was busy."""
    if options.json:
        print(json.dumps(outcome.to_json()))
    elif options.stats:
        print(outcome.summary(), file=sys.stderr)
    elif is_terminal(sys.stderr) and not options.quiet:
        print_dim(outcome.result.figures, sys.stderr)
    note_busy("generate", outcome)
