"""`ygg generate`: stream text to standard output, everything else to standard error."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from yggdrasil.cli.compile import pair_name
from yggdrasil.cli.heap import frozen_heap
from yggdrasil.cli.prompt import prompt_of
from yggdrasil.cli.threads import add_threads, apply_threads, note_threads
from yggdrasil.config import DEFAULT_NEW_TOKENS, GenerateConfig, SamplingConfig
from yggdrasil.errors import ConfigError

if TYPE_CHECKING:
    from yggdrasil.pair import LoadedPair
    from yggdrasil.report.run import Run

__all__ = ["add_parser", "run"]

DESCRIPTION = """\
Continue a prompt with speculation. The text is what the target alone would write; --plain shows that.
The prompt is every word that is not an option; "-" reads it from standard input.

A pair compiled for several GPUs: torchrun --nproc-per-node 2 -m yggdrasil generate ...
"""


def add_parser(verbs: Any) -> None:
    """Add the verb to the command line."""
    sampling = SamplingConfig()
    parser = verbs.add_parser(
        "generate",
        help="write text",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "prompt", nargs="*", default=[], help='the text to continue, or "-" for standard input'
    )
    parser.add_argument("--pair", help="a pair compiled with `ygg compile` (default: the bundled pair)")
    parser.add_argument(
        "--target", help="instead of --pair: folder or hub id of the target; compiled first if needed"
    )
    parser.add_argument("--draft", help="with --target: folder or hub id of the draft")
    parser.add_argument(
        "--predictor",
        metavar="DATASET",
        help="calibration text whose depth predictor to use (default: the last one compiled)",
    )
    parser.add_argument(
        "-n", "--max-tokens", "--max-new-tokens", type=int, metavar="N", dest="max_new_tokens",
        help=f"most tokens to write (default: {DEFAULT_NEW_TOKENS}, less if the context is full before)",
    )  # fmt: skip
    parser.add_argument(
        "--temperature",
        type=float,
        default=sampling.temperature,
        help="0 takes the likeliest token (default: %(default)s)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=sampling.top_k,
        help="keep the k likeliest tokens; 0 keeps all (default: %(default)s)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=sampling.top_p,
        help="keep this probability mass (default: %(default)s)",
    )
    parser.add_argument(
        "--min-p",
        type=float,
        default=sampling.min_p,
        help="drop tokens below this fraction of the likeliest (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=sampling.seed,
        help="the same seed writes the same text, with speculation and without (default: %(default)s)",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the output before this text; may be repeated",
    )
    parser.add_argument("--plain", action="store_true", help="decode without speculation")
    parser.add_argument(
        "--ignore-eos", action="store_true", help="continue after the end-of-text token, for measurements"
    )
    add_threads(parser, "; the number does not change the text")
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
    config = _config(options)
    prompt = prompt_of(options.prompt)
    apply_threads(options)
    name = pair_name(
        options, lambda target, draft: _check_uncompiled(options, config, prompt, target, draft)
    )
    from yggdrasil.pair import load_pair  # imports torch, a second: after wrong options are refused

    pair = load_pair(name, dataset=options.predictor)
    note_threads(pair.latency, pair.bundle.command)
    from yggdrasil.engine import check_request  # after the pair: torch is imported by then
    from yggdrasil.policy.latency import BUSY_FACTOR
    from yggdrasil.report.run import Run

    tokens = pair.tokenizer.encode(prompt)
    check_request(len(tokens), config, pair.engine.max_context)
    outcome = Run(pair, tokens, config, start=start)
    with frozen_heap():
        _stream(outcome, options, pair)
    if options.json:
        print(json.dumps(outcome.to_json()))
    elif options.stats:
        print(outcome.summary(), file=sys.stderr)
    if outcome.slowdown is not None and outcome.slowdown >= BUSY_FACTOR:
        print(_busy_line(outcome.slowdown, pair.bundle.command), file=sys.stderr)


def _check_uncompiled(
    options: argparse.Namespace, config: GenerateConfig, prompt: str, target: str, draft: str
) -> None:
    """Refuse what cannot work with this pair before it is compiled, which takes minutes."""
    from yggdrasil.engine import check_request
    from yggdrasil.offline.inputs import planned_context
    from yggdrasil.offline.traces import BUNDLED_TEXT
    from yggdrasil.tokenizer import load_tokenizer

    if options.predictor not in (None, BUNDLED_TEXT):
        allowed = f"{BUNDLED_TEXT} if the pair is not compiled yet"
        raise ConfigError("predictor", options.predictor, allowed)
    num_tokens = len(load_tokenizer(target).backend_tokenizer.encode(prompt).ids)
    check_request(num_tokens, config, planned_context(target, draft))


def _busy_line(slowdown: float, command: str) -> str:
    return (
        f"ygg generate: the machine is busy: steps took {slowdown:.1f} times what its profile predicts; "
        f"end other programs, or if there are none, measure it again: {command}"
    )


def _stream(outcome: Run, options: argparse.Namespace, pair: LoadedPair) -> None:
    for text, result in outcome.steps():
        if not options.json:
            print(text, end="", flush=True)
        if options.show_tree and result is not None:
            labels = [pair.tokenizer.token_text(token) for token in result.tree.token_N.tolist()]
            print(f"\n{result.tree.render(labels, result.path)}", file=sys.stderr)
    if not options.json:
        print()


def _config(options: argparse.Namespace) -> GenerateConfig:
    sampling = SamplingConfig(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
    )
    return GenerateConfig(
        max_new_tokens=options.max_new_tokens,
        stop=tuple(options.stop),
        ignore_eos=options.ignore_eos,
        plain=options.plain,
        sampling=sampling,
    )
