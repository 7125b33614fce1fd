"""The options of one request, which the verbs that write text share: pair, limit, sampling, grammar."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from yggdrasil.cli.compile import NO_DRAFT, pair_name
from yggdrasil.cli.threads import add_threads, apply_threads, note_threads
from yggdrasil.config import DEFAULT_NEW_TOKENS, GenerateConfig, GrammarConfig, SamplingConfig
from yggdrasil.errors import ConfigError

if TYPE_CHECKING:
    from yggdrasil.api import Pair
    from yggdrasil.pair import LoadedPair
    from yggdrasil.report.run import Run

__all__ = ["add_grammars", "add_pair", "add_request", "load_chosen_pair", "note_busy", "request_config"]

OPTIONS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "logit_bias"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "min_tokens"),
)
"""Options that are fields of a sampling, under their own names."""


def add_pair(parser: argparse.ArgumentParser) -> None:
    """Options that choose the models."""
    parser.add_argument("--pair", help="a pair compiled with `ygg compile` (default: the bundled pair)")
    parser.add_argument(
        "--target", help="instead of --pair: folder or hub id of the target; compiled first if needed"
    )
    parser.add_argument(
        "--draft",
        help="with --target: folder or hub id of the draft (default: made from the target); none, with any "
        "pair: verify what repeats in the text, and run no draft",
    )
    parser.add_argument(
        "--predictor",
        metavar="DATASET",
        help="calibration text whose depth predictor to use (default: the last one compiled)",
    )


def add_request(parser: argparse.ArgumentParser) -> None:
    """Options of every text: its limit, how tokens are taken, where it ends, and the threads."""
    parser.add_argument(
        "-n", "--max-tokens", "--max-new-tokens", type=int, metavar="N", dest="max_new_tokens",
        help=f"most tokens to write (default: {DEFAULT_NEW_TOKENS}, less if the context is full before)",
    )  # fmt: skip
    _add_sampling(parser)
    _add_processors(parser)
    parser.add_argument(
        "--no-model-defaults",
        dest="model_defaults",
        action="store_false",
        help="ignore the sampling that the target's generation_config.json or GGUF file asks for",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the output before this text; may be repeated",
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="continue after the end-of-text token, for measurements"
    )
    add_threads(parser, "; the number does not change the text")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    """Options of how a token is taken from the logits."""
    sampling = SamplingConfig()
    parser.add_argument(
        "--temperature",
        type=float,
        help=f"0 takes the likeliest token (default: the model's, or {sampling.temperature:g})",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        help=f"keep the k likeliest tokens; 0 keeps all (default: the model's, or {sampling.top_k})",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        help=f"keep this probability mass (default: the model's, or {sampling.top_p:g})",
    )
    parser.add_argument(
        "--min-p",
        type=float,
        help=f"drop tokens below this share of the likeliest (default: the model's, or {sampling.min_p:g})",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=sampling.seed,
        help="the same seed writes the same text, with speculation and without (default: %(default)s)",
    )


def _add_processors(parser: argparse.ArgumentParser) -> None:
    """Options that change the target's logits."""
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        help="make tokens of prompt and output less likely, from 1 (off) on (default: the model's, or 1)",
    )
    parser.add_argument(
        "--presence-penalty",
        type=float,
        help="subtract this from the logits of emitted tokens (default: 0)",
    )
    parser.add_argument(
        "--frequency-penalty", type=float, help="subtract this once for every occurrence (default: 0)"
    )
    parser.add_argument(
        "--no-repeat-ngram-size",
        type=int,
        help="write no sequence of this many tokens twice; 0 is off (default: the model's, or 0)",
    )
    parser.add_argument(
        "--min-tokens", type=int, help="write at least this many tokens (default: the model's, or 0)"
    )
    parser.add_argument(
        "--ban",
        action="append",
        metavar="TEXT",
        help="never write this text as its tokenizer spells it; may be repeated",
    )
    parser.add_argument(
        "--logit-bias",
        action="append",
        type=_bias,
        metavar="TOKEN=VALUE",
        help="add a value to the logit of a token id; -inf bans it; may be repeated",
    )


def add_grammars(parser: argparse.ArgumentParser) -> None:
    """Options for what the text must be; at most one of them."""
    grammars = parser.add_mutually_exclusive_group()
    grammars.add_argument(
        "--json-schema", metavar="FILE", help="write JSON that is an instance of the schema in a file"
    )
    grammars.add_argument(
        "--regex", metavar="REGEX", help="write a text that a regular expression matches as a whole"
    )
    grammars.add_argument(
        "--grammar", metavar="FILE", help="write a sentence of the Lark grammar in a file"
    )
    grammars.add_argument(
        "--choice", action="append", metavar="TEXT", help="write one of these texts; may be repeated"
    )


def _grammar(options: argparse.Namespace) -> GrammarConfig | None:
    """What the text must be, if anything."""
    if "regex" not in options:  # a verb without grammars
        return None
    if options.json_schema is not None:
        return GrammarConfig.of("json", _read("json_schema", options.json_schema))
    if options.grammar is not None:
        return GrammarConfig.of("grammar", _read("grammar", options.grammar))
    if options.regex is not None:
        return GrammarConfig.of("regex", options.regex)
    return None if options.choice is None else GrammarConfig.of("choice", options.choice)


def _read(option: str, path: str) -> str:
    """The text of an option's file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(option, path, f"a file in UTF-8 ({error})") from None


def _texts(option: str, texts: Sequence[str]) -> tuple[str, ...]:
    """The texts of an option; the shell passes bytes that are not UTF-8 as lone surrogates."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(option, text, "text in UTF-8") from None
    return tuple(texts)


def _bias(text: str) -> tuple[int, float]:
    """A token id and the value to add."""
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a token id and a number, as in 13=-2.5"
        ) from None


def request_config(options: argparse.Namespace, pair: LoadedPair | None = None) -> GenerateConfig:
    """The request. Before the pair is loaded, its defaults and banned texts are left out."""
    chosen = {name: getattr(options, name) for name in OPTIONS if getattr(options, name) is not None}
    chosen["grammar"] = _grammar(options)
    ban = _texts("ban", options.ban or ())
    if pair is not None:
        defaults = pair.bundle.defaults if options.model_defaults else {}
        banned = pair.tokenizer.spellings(ban)
        chosen = {**defaults, **chosen, "banned": [*defaults.get("banned", ()), *banned]}
    return GenerateConfig(
        max_new_tokens=options.max_new_tokens,
        stop=_texts("stop", options.stop),
        ignore_eos=options.ignore_eos,
        plain=options.plain,
        draft=options.draft != NO_DRAFT,
        sampling=SamplingConfig.of(chosen),
    )


def load_chosen_pair(options: argparse.Namespace, config: GenerateConfig, prompt: str) -> Pair:
    """The pair of the options, on the threads of the options; compiled first if it must be.

    Args:
        config: The request, to refuse what cannot work before a compilation.
        prompt: The beginning of the text, for the same.
    """
    apply_threads(options)
    name = pair_name(options, lambda models: _check_uncompiled(options, config, prompt, models))
    from yggdrasil.api import load_pair  # imports torch, a second: after wrong options are refused

    pair = load_pair(name, dataset=options.predictor)
    note_threads(pair.latency, pair.bundle.command)
    return pair


def _check_uncompiled(
    options: argparse.Namespace, config: GenerateConfig, prompt: str, models: Sequence[str]
) -> None:
    """Refuse what cannot work with this pair before it is compiled, which takes minutes."""
    from yggdrasil.engine import check_request
    from yggdrasil.models.hub import check_name
    from yggdrasil.models.tokenizer import load_tokenizer
    from yggdrasil.offline.inputs import planned_context
    from yggdrasil.offline.traces import BUNDLED_TEXT

    if options.predictor not in (None, BUNDLED_TEXT):
        allowed = f"{BUNDLED_TEXT} if the pair is not compiled yet"
        raise ConfigError("predictor", options.predictor, allowed)
    for model in models:
        check_name(model)  # without it, a look-up on a hub that does not answer is tried for a minute
    num_tokens = len(load_tokenizer(models[0]).backend_tokenizer.encode(prompt).ids)
    check_request(num_tokens, config, planned_context(models))


def note_busy(verb: str, outcome: Run) -> None:
    """Print a line on standard error if steps took several times what the profile predicts."""
    from yggdrasil.policy.latency import BUSY_FACTOR

    slowdown = outcome.slowdown
    if slowdown is not None and slowdown >= BUSY_FACTOR:
        print(
            f"ygg {verb}: the machine is busy: steps took {slowdown:.1f} times what its profile predicts; "
            f"end other programs, or if there are none, measure it again: {outcome.pair.bundle.command}",
            file=sys.stderr,
        )
