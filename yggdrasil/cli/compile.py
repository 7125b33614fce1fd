"""`ygg compile`: compile a pair to static graphs, measure this machine, calibrate acceptance."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yggdrasil.cli.threads import add_threads, apply_threads
from yggdrasil.config import AUTO, WEIGHTS, CompileConfig
from yggdrasil.errors import ConfigError, UsageError
from yggdrasil.ranks.launch import num_ranks

if TYPE_CHECKING:
    from yggdrasil.bundle import Bundle

__all__ = ["NO_DRAFT", "add_parser", "pair_name", "run"]

NO_DRAFT = "none"
DESCRIPTION = """\
Compile a target and a draft for this machine, once. TorchInductor compiles each to one static graph per
token count of a small menu; then the graphs are timed, and the draft is calibrated on text. After Ctrl-C,
run the same command again: finished graphs are kept. Until the new pair is done, an earlier one of that
name still works. Without arguments, the bundled pair is compiled.

Without a draft, one is made from the target: its weights in 4 or 8 bits, some of its layers, or both,
whichever is the best on calibration text. The text stays the target's. `ygg show pair` has the choice.

For several GPUs: torchrun --nproc-per-node 2 -m yggdrasil compile TARGET DRAFT ...
The target is split by its tensor-parallel plan in transformers; the pair then runs on as many processes.
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
    parser.add_argument("target", nargs="?", help="folder, GGUF file or hub id of the target model")
    parser.add_argument(
        "draft",
        nargs="?",
        help="the same of a small model with the same tokenizer (default: made from the target)",
    )
    parser.add_argument(
        "--name",
        help="name of the pair (default: the target's folder name, and the formats of rounded weights)",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help='text to calibrate on: a text file, or .jsonl with a "text" in every line',
    )
    parser.add_argument(
        "--calibration-budget",
        type=float,
        default=defaults.calibration_budget_s,
        metavar="SECONDS",
        help="most seconds for calibration; slow pairs get fewer, shallower trees (default: %(default)g)",
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
        help="on cuda, use linear layers that round the same in every graph, so that speculation writes "
        "what plain decoding writes, bit for bit; --no-exact uses cuBLAS, where rounding depends on the "
        "number of tokens. On a cpu every graph is exact (default: --exact)",
    )
    parser.add_argument(
        "--compress",
        action=argparse.BooleanOptionalAction,
        default=defaults.compress,
        help="on a cpu, store bfloat16 weights without loss in three quarters of their bytes; faster if "
        "the processor waits for memory (default: on processors with AMX, for models of more than 8 MB)",
    )
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        default=defaults.weights,
        help="on a cpu, the target's weights: bf16 keeps them (in --dtype); int8 and int4 round them, so "
        "fewer bytes are read and the text changes a little; `ygg show pair` has the perplexity. A "
        "checkpoint that is quantised is read in --dtype; if it has 4 bits, int4 keeps its numbers "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--draft-weights",
        choices=WEIGHTS,
        help="the same for the draft, whose weights change the speed but never the text "
        f"(default: {defaults.draft_weights}, or the best for a draft made from the target)",
    )
    parser.add_argument(
        "--draft-layers",
        type=int,
        metavar="N",
        help="layers of a draft made from the target (default: the best number)",
    )
    add_threads(parser, "; also processes that compile graphs, and threads of the measurements")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Compile a pair and print what was measured."""
    config = _config(options)
    from yggdrasil.offline.pipeline import compile_pair
    from yggdrasil.offline.traces import CALIBRATION_TEXT
    from yggdrasil.report.progress import RichProgress

    target, draft, name = _models_and_name(options, config.rounded)
    apply_threads(options)
    start = time.perf_counter()
    bundle = compile_pair(
        target,
        draft,
        name=name,
        config=config,
        calibration=options.calibration or CALIBRATION_TEXT,
        num_workers=options.threads,
        progress=RichProgress(),
    )
    for note in bundle.notes:
        print(f"ygg compile: note: {note}", file=sys.stderr)
    _report(bundle, time.perf_counter() - start)


def _config(options: argparse.Namespace) -> CompileConfig:
    is_alone = options.target is not None and options.draft is None
    return CompileConfig(
        device=options.device,
        dtype=options.dtype,
        max_context=options.max_context,
        exact=options.exact,
        compress=options.compress,
        weights=options.weights,
        draft_weights=options.draft_weights or (AUTO if is_alone else CompileConfig().draft_weights),
        draft_layers=options.draft_layers,
        calibration_budget_s=options.calibration_budget,
        ranks=num_ranks(),
    )


def _models_and_name(options: argparse.Namespace, rounded: str) -> tuple[str, str | None, str]:
    """Target, draft if one is given, and name of the pair to compile.

    Args:
        rounded: Suffix of a name that is not given: pairs that differ in their weights live side by side.
    """
    from yggdrasil.offline.inputs import resolved

    if options.target is None:
        if options.name is not None:
            problem = "--name needs the models that it names"
            raise UsageError(problem, f"ygg compile TARGET DRAFT --name {options.name}")
        target, draft, name = _bundled_pair()
        return target, draft, f"{name}{rounded}"
    own_name = f"{Path(resolved(options.target)).name}{rounded}"
    name = own_name if options.name is None else options.name
    _check_name(name, [model for model in (options.target, options.draft) if model is not None])
    return options.target, options.draft, name


def _bundled_pair() -> tuple[str, str, str]:
    from yggdrasil.bundle import BUNDLED, bundled_models

    target, draft = bundled_models()
    return str(target), str(draft), BUNDLED


def _check_name(name: str, models: Sequence[str]) -> None:
    """Raise ConfigError for a name that cannot be a folder in the store, or is reserved."""
    from yggdrasil.bundle import BUNDLED
    from yggdrasil.store.artifacts import OPERATORS

    if name in (BUNDLED, OPERATORS) or not re.fullmatch(r"[^\W_][\w.-]{0,99}", name):
        allowed = (
            "at most 100 letters, digits, dots, dashes and underscores, a letter or digit first; "
            f"{BUNDLED} and {OPERATORS} are taken"
        )
        command = f"{shlex.join(['ygg', 'compile', *models])} --name NAME"
        raise ConfigError("name", name, allowed, command)


def pair_name(
    options: argparse.Namespace, check: Callable[[Sequence[str]], None] = lambda models: None
) -> str:
    """Name of the pair that `--pair`, or `--target` and `--draft`, choose.

    The bundled pair, and a pair given by its models, are compiled if they are not yet. `--draft none`
    chooses no pair.

    Args:
        options: Options of `ygg generate` or `ygg serve`.
        check: Called with the models before they are compiled, to refuse what cannot work later.

    Raises:
        UsageError: the target is missing, or both a name and models are given.
    """
    verb = f"ygg {options.verb}"
    draft = None if options.draft == NO_DRAFT else options.draft
    if options.pair is not None and (options.target is not None or draft is not None):
        problem = "--pair cannot be combined with --target and --draft"
        raise UsageError(problem, f"{verb} --pair {options.pair}")
    if draft is not None and options.target is None:
        raise UsageError("--target is missing", f"{verb} --target TARGET --draft {draft}")
    from yggdrasil.bundle import BUNDLED
    from yggdrasil.offline.on_demand import compiled_name

    models = [model for model in (options.target, draft) if model is not None] or None
    name = BUNDLED if options.pair is None else options.pair
    return compiled_name(name, models, check=check, num_workers=options.threads)


def _report(bundle: Bundle, seconds: float) -> None:
    from yggdrasil.bundle import BUNDLED
    from yggdrasil.pair import load_pair
    from yggdrasil.policy.shape import best_shape
    from yggdrasil.report.tables import depth_table, plan_table

    loaded = load_pair(bundle.name)
    print(f"compiled {bundle.name} in {seconds:.0f} s")
    print(f"  {bundle.exactness}")
    print(f"  {bundle.weights}")
    for line in bundle.own_draft.lines if bundle.own_draft else ():
        print(f"  {line}")
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
