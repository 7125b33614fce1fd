"""`ygg compile`: lower a pair to static graphs, measure this machine, calibrate acceptance."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yggdrasil.cli.threads import add_threads, apply_threads
from yggdrasil.config import CompileConfig
from yggdrasil.errors import ConfigError, UsageError
from yggdrasil.ranks.launch import num_ranks

if TYPE_CHECKING:
    from yggdrasil.bundle import Bundle

__all__ = ["add_parser", "pair_name", "run"]

DESCRIPTION = """\
Compile a target and a draft for this machine, once. TorchInductor lowers each to one static graph for
every token count of a small menu. Then the graphs are timed, and the draft is calibrated on text. After
Ctrl-C, the same command continues with the graphs that are finished; until the new pair is complete, an
earlier one of the same name works. Without arguments, the bundled pair is compiled.

Several processes can share the target by transformers' tensor-parallel plan:

  torchrun --nproc-per-node 2 -m yggdrasil compile TARGET DRAFT --name mine

The pair then runs on the same number of processes.
"""


def add_parser(verbs: Any) -> None:
    """Add the verb to the command line."""
    defaults = CompileConfig()
    parser = verbs.add_parser(
        "compile",
        help="prepare a pair of models for this machine",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", nargs="?", help="folder or hub id of the target model")
    parser.add_argument(
        "draft", nargs="?", help="folder or hub id of a small model with the same tokenizer"
    )
    parser.add_argument("--name", help="name of the pair (default: the target's folder name)")
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help='text to calibrate acceptance on: plain, or .jsonl with a "text" a line',
    )
    parser.add_argument(
        "--calibration-budget",
        type=float,
        default=defaults.calibration_budget_s,
        metavar="SECONDS",
        help="most seconds for writing calibration text and drafting along it; a large pair gets fewer "
        "trees and texts (default: %(default)g)",
    )
    parser.add_argument("--device", default=defaults.device, help="cpu or cuda (default: %(default)s)")
    parser.add_argument(
        "--dtype", default=defaults.dtype, help="bfloat16 or float32 (default: %(default)s)"
    )
    parser.add_argument(
        "--max-context",
        type=int,
        help="most tokens of prompt and output together (default: the models' limit, at most 2048)",
    )
    parser.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        default=defaults.exact,
        help="on cuda, linear layers that round alike in every graph, so that speculation writes what "
        "plain decoding writes, to the bit; --no-exact takes "
        "cuBLAS's, which round by the number of tokens. On a cpu every graph is exact anyway (default: "
        "--exact)",
    )
    parser.add_argument(
        "--compress",
        action=argparse.BooleanOptionalAction,
        default=defaults.compress,
        help="on a cpu, keep bfloat16 weights in three quarters of their bytes, and every bit of them: "
        "useful where memory is the limit and the processor "
        "has time to expand them (default: on processors with AMX, models of more than 8 MB)",
    )
    add_threads(parser, ", and processes that build graphs; the pair is measured with as many")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Compile and print what to do next."""
    from yggdrasil.offline.pipeline import bundled_arguments, resolved

    config = CompileConfig(
        device=options.device,
        dtype=options.dtype,
        max_context=options.max_context,
        exact=options.exact,
        compress=options.compress,
        calibration_budget_s=options.calibration_budget,
        ranks=num_ranks(),
    )
    if options.target is None and options.name is not None:
        raise UsageError(
            "--name goes with the models it is for", f"ygg compile TARGET DRAFT --name {options.name}"
        )
    if options.target is None:
        target, draft, name = bundled_arguments()
    elif options.draft is None:
        raise UsageError("the draft is missing", f"{shlex.join(['ygg', 'compile', options.target])} DRAFT")
    else:
        target = options.target
        draft = options.draft
        name = options.name or Path(resolved(options.target)).name
        _check_name(name, target, draft)
    apply_threads(options)
    _report(*_compile(target, draft, name, config, options.calibration, options.threads))


def _check_name(name: str, target: str, draft: str) -> None:
    """Raises ConfigError for what cannot be a folder of its own in the stores, or is one already."""
    from yggdrasil.bundle import BUNDLED
    from yggdrasil.store.artifacts import OPERATORS

    if name in (BUNDLED, OPERATORS) or not re.fullmatch(r"[^\W_][\w.-]*", name):
        allowed = (
            f"letters, digits, dots, dashes and underscores, a letter or digit first; {BUNDLED} and "
            f"{OPERATORS} are taken"
        )
        raise ConfigError(
            "name", name, allowed, f"{shlex.join(['ygg', 'compile', target, draft])} --name NAME"
        )


def pair_name(
    options: argparse.Namespace, check: Callable[[str, str], None] = lambda target, draft: None
) -> str:
    """The compiled pair that `--pair`, or `--target` and `--draft`, name; compiled first if need be, but
    for a name that nobody compiled.

    Args:
        check: Called with target and draft before they are compiled, to refuse what could not work
            afterwards.

    Raises:
        UsageError: half of a pair, or two.
    """
    verb = f"ygg {options.verb}"
    if options.pair is not None and (options.target is not None or options.draft is not None):
        raise UsageError("--pair goes without --target and --draft", f"{verb} --pair {options.pair}")
    if options.target is not None and options.draft is None:
        raise UsageError("--draft is missing", f"{verb} --target {options.target} --draft DRAFT")
    if options.draft is not None and options.target is None:
        raise UsageError("--target is missing", f"{verb} --target TARGET --draft {options.draft}")
    from yggdrasil.bundle import BUNDLED, is_compiled

    if options.target is not None:
        return _compile_named(options.target, options.draft, options.threads, check)
    if options.pair in (None, BUNDLED) and not is_compiled(BUNDLED):
        _compile_bundled(options.threads, check)
    return options.pair or BUNDLED


def _compile_named(target: str, draft: str, threads: int | None, check: Callable[[str, str], None]) -> str:
    """Under a name made of both models, unless that is done."""
    from yggdrasil.bundle import is_compiled
    from yggdrasil.offline.pipeline import resolved
    from yggdrasil.store.artifacts import digest

    name = f"{Path(target).resolve().name}-{digest(resolved(target), resolved(draft))}"
    # one that `ygg compile --name` takes, for errors will name that command
    name = re.sub(r"[^\w.-]", "-", name).lstrip("._-")
    if not is_compiled(name):
        check(target, draft)
        _compile(target, draft, name, CompileConfig(ranks=num_ranks()), None, threads)
    return name


def _compile_bundled(threads: int | None, check: Callable[[str, str], None]) -> None:
    """With its defaults, for a first `ygg generate` or `ygg serve`."""
    from yggdrasil.offline.pipeline import bundled_arguments

    check(*bundled_arguments()[:2])
    print("first run: compiling the bundled pair for this machine (a few minutes, once)", file=sys.stderr)
    _compile(*bundled_arguments(), CompileConfig(ranks=num_ranks()), None, threads)


def _compile(
    target: str, draft: str, name: str, config: CompileConfig, calibration: Path | None, threads: int | None
) -> tuple[Bundle, float]:
    from yggdrasil.cli.progress import RichProgress
    from yggdrasil.offline.pipeline import compile_pair
    from yggdrasil.offline.traces import CALIBRATION_TEXT

    start = time.perf_counter()
    bundle = compile_pair(
        target,
        draft,
        name=name,
        config=config,
        calibration=calibration or CALIBRATION_TEXT,
        num_workers=threads,
        progress=RichProgress(),
    )
    for note in bundle.notes:
        print(f"ygg compile: note: {note}", file=sys.stderr)
    return bundle, time.perf_counter() - start


def _report(bundle: Bundle, seconds: float) -> None:
    from yggdrasil.bundle import BUNDLED
    from yggdrasil.pair import load_pair
    from yggdrasil.policy.shape import best_shape
    from yggdrasil.report.tables import depth_table, plan_table

    loaded = load_pair(bundle.name)
    print(f"compiled {bundle.name} in {seconds:.0f} s")
    print(f"  {bundle.exactness}")
    for temperature, acceptance in loaded.acceptance.by_temperature.items():
        shape, gain = best_shape(
            acceptance,
            loaded.latency,
            widths=bundle.config.widths,
            verify_widths=bundle.config.verify_widths,
            context_len=0,
        )
        print(f"  temperature {temperature}: {shape}, predicted speedup over plain decoding {gain:.2f}")
    print(plan_table(loaded))
    print(depth_table(loaded))
    for path in (bundle.folder, bundle.profile_path, bundle.predictor_folder(bundle.dataset)):
        print(f"  {path}")
    pair = "" if bundle.name == BUNDLED else f" --pair {bundle.name}"
    print(f'next: ygg generate{pair} "Once upon a time"')
