"""transformers' `generate` over a compiled pair: its arguments, and its tensor of sequences.

Shapes: P = tokens of a padded prompt, R = those and the longest new text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from yggdrasil.api import Pair
from yggdrasil.config import MOST_COUNT, GenerateConfig
from yggdrasil.errors import ConfigError, first_line
from yggdrasil.models.defaults import APPLIED, PROCESSORS, SAMPLING
from yggdrasil.report.run import Result, Run
from yggdrasil.store.sources import is_gguf

__all__ = ["generate"]

NEW_TOKENS = 20  # transformers' default
TOP_K = 50  # the same
ID_TYPES = (torch.int64, torch.int32)  # the same
NEUTRAL = {
    **PROCESSORS,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "max_time": None,
    "token_healing": False,
    "use_cache": True,
}
"""Arguments that have no equivalent here, with the value that has no effect."""


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MOST_COUNT


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _is_ids(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_count, value))


def _is_ends(value: object) -> bool:
    return _is_count(value) or _is_ids(value)


def _is_words(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_ids, value)) and all(value)


COUNT = (_is_count, f"a whole number from 0 to {MOST_COUNT}")
NUMBER = (_is_number, "a number")
TAKEN: dict[str, tuple[Callable[[object], bool], str]] = {
    "max_new_tokens": COUNT,
    "max_length": COUNT,
    "min_new_tokens": COUNT,
    "do_sample": (lambda value: type(value) is bool, "True or False"),
    "temperature": NUMBER,
    "top_k": COUNT,
    "top_p": NUMBER,
    "min_p": NUMBER,
    "repetition_penalty": NUMBER,
    "no_repeat_ngram_size": COUNT,
    "eos_token_id": (_is_ends, "a token id, or a list of them"),
    "pad_token_id": (_is_count, "a token id"),
    "bad_words_ids": (_is_words, "a list of lists of token ids, none of them empty"),
    "suppress_tokens": (_is_ids, "a list of token ids"),
}
"""Arguments that have an effect, and what their values must be; None leaves one out, as in transformers."""


def generate(
    pair: Pair,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    generation_config: Any = None,
    seed: int | None = None,
    **arguments: Any,
) -> Tensor:
    """What `model.generate` of the target returns: greedy the same tokens, sampled the same distribution.

    In bfloat16 transformers rounds other sums, so tokens may differ where two logits are nearly equal.
    Padding is no part of a prompt here, so the repetition penalty does not count it; transformers does.

    Args:
        pair: Decodes; its target takes the place of the model.
        input_ids: (B, P) token ids, padded on the left.
        attention_mask: (B, P) 0 at padding, 1 elsewhere; None without padding.
        generation_config: A transformers `GenerationConfig`; what it leaves open is as in the target's own.
        seed: Of the first row, the next one of the second; by default a sampled text draws it from torch's
            generator, which `torch.manual_seed` sets.
        arguments: As in transformers: those in `TAKEN`. Others may only have the value without effect.

    Returns:
        (B, R) int64: the prompts with their padding, then the new tokens, padded on the right.

    Raises:
        ConfigError: names an argument that does not exist here, or whose value is not allowed.

    Example: the tensors of a transformers tokenizer go in, and its `batch_decode` reads what comes out.
        >>> from yggdrasil import load_pair
        >>> from yggdrasil.bridge import generate
        >>> def write(tokenizer):
        ...     tokenizer.pad_token = tokenizer.eos_token
        ...     tokenizer.padding_side = "left"
        ...     inputs = tokenizer(["Once upon a time", "One day"], return_tensors="pt", padding=True)
        ...     sequences = generate(load_pair(), **inputs, max_new_tokens=64)
        ...     print(tokenizer.batch_decode(sequences, skip_special_tokens=True))
    """
    if not isinstance(pair, Pair):
        raise ConfigError("pair", pair, "a Pair, which load_pair() returns")
    settings = _settings(pair, generation_config, arguments)
    ends = _ends(pair, _listed(settings.eos_token_id))
    pad = _listed(settings.pad_token_id)
    rows = _prompts(input_ids, attention_mask, None if pad in ends else pad)
    prompts = [pair.tokens(row) for row in rows]
    seeds = _seeds(seed, len(prompts), is_sampled=bool(settings.do_sample))
    options = {**_options(settings, input_ids.shape[1]), "stop_tokens": ends, "ignore_eos": True}
    configs = [GenerateConfig.of({**options, "seed": each}) for each in seeds]
    results = _decoded(pair, list(zip(prompts, configs, strict=True)))
    return _sequences(input_ids, results, next(iter(ends), 0) if pad is None else pad)


def _settings(pair: Pair, given: Any, arguments: Mapping[str, Any]) -> Any:
    """The arguments, then the given config, then the target's own; all of it can be applied."""
    from transformers import GenerationConfig

    for name, value in arguments.items():
        if name not in (*TAKEN, *NEUTRAL) and value is not None:
            raise ConfigError("argument", name, f"one of {', '.join(TAKEN)}")
    _check(arguments)
    if not isinstance(given, GenerationConfig | None):
        raise ConfigError("generation_config", given, "a GenerationConfig of transformers")
    own = _own(pair)
    settings: Any = own if given is None else deepcopy(given)
    try:
        settings.update(**own.to_dict(), defaults_only=True)
        settings.update(**arguments)
    except (TypeError, ValueError) as error:  # such as a limit of 0
        allowed = f"what transformers takes ({first_line(error)})"
        raise ConfigError("arguments", dict(arguments), allowed) from None
    _check(vars(settings))
    return settings


def _own(pair: Pair) -> Any:
    """The target's own config; that of a GGUF file is the sampling that it asks for."""
    from transformers import GenerationConfig

    target = pair.bundle.models[0]
    if is_gguf(target):
        sampling = {"do_sample": "temperature" in pair.bundle.defaults, **pair.bundle.defaults}
        return GenerationConfig(**sampling)  # type: ignore[no-untyped-call]
    try:
        return GenerationConfig.from_pretrained(target)
    except OSError:  # a target without that file
        return GenerationConfig()  # type: ignore[no-untyped-call]


def _check(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value of a wrong type, or a setting without equivalent that has an effect."""
    for name, (is_allowed, allowed) in TAKEN.items():
        value = _listed(settings.get(name))
        if value is not None and not is_allowed(value):
            raise ConfigError(name, value, allowed)
    for name, neutral in NEUTRAL.items():
        value = settings.get(name)
        is_neutral = value is None or (isinstance(value, int | float) and value == neutral)
        if not is_neutral:
            raise ConfigError(name, value, f"{neutral}: nothing here does the same")


def _listed(value: Any) -> Any:
    """A tensor as numbers, for transformers takes both; anything else as it is."""
    return value.tolist() if isinstance(value, Tensor) else value


def _ends(pair: Pair, tokens: int | Sequence[int] | None) -> tuple[int, ...]:
    if tokens is None:
        return tuple(sorted(pair.engine.eos_tokens))
    return (tokens,) if isinstance(tokens, int) else tuple(tokens)


def _seeds(seed: int | None, num_rows: int, *, is_sampled: bool) -> Sequence[int]:
    """The seed of every row; a text that is not sampled has none, and draws nothing."""
    if seed is not None and type(seed) is not int:
        raise ConfigError("seed", seed, "a whole number")
    if seed is not None:
        return range(seed, seed + num_rows)
    return torch.randint(2**62, (num_rows,)).tolist() if is_sampled else [0] * num_rows


def _prompts(input_ids: Tensor, attention_mask: Tensor | None, padding: int | None) -> list[list[int]]:
    """The tokens of every row without its padding.

    Args:
        padding: A token that is only padding, if there is one.
    """
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.dtype not in ID_TYPES:
        raise ConfigError("input_ids", input_ids, "a tensor of token ids with a row for every prompt")
    if attention_mask is None:
        if padding is not None and padding in input_ids:
            raise ConfigError("attention_mask", None, "given: the prompts have padding")
        return input_ids.tolist()
    if not isinstance(attention_mask, Tensor):
        raise ConfigError("attention_mask", attention_mask, "a tensor of the shape of input_ids")
    is_token = attention_mask.bool()
    if is_token.shape != input_ids.shape or bool((is_token[:, :-1] & ~is_token[:, 1:]).any()):
        allowed = "of the shape of input_ids, 0 at padding on the left and 1 after it"
        raise ConfigError("attention_mask", attention_mask.tolist(), allowed)
    return [row[mask].tolist() for row, mask in zip(input_ids, is_token, strict=True)]


def _options(settings: Any, prompt_len: int) -> dict[str, Any]:
    """Limits and sampling by their names here."""
    options = {here: getattr(settings, theirs) for theirs, here in APPLIED.items()}
    if settings.do_sample:
        options |= {"temperature": 1.0, "top_k": TOP_K}
        given = {name: getattr(settings, name) for name in ("temperature", *SAMPLING)}
        options |= {name: value for name, value in given.items() if value is not None}
    words = _listed(settings.bad_words_ids) or []
    banned = [*words, *([token] for token in _listed(settings.suppress_tokens) or ())]
    limit = settings.max_new_tokens
    if limit is None:
        limit = NEW_TOKENS if settings.max_length is None else settings.max_length - prompt_len
    options |= {"max_new_tokens": limit, "banned": banned}
    return {name: value for name, value in options.items() if value is not None}


def _decoded(pair: Pair, requests: Sequence[tuple[list[int], GenerateConfig]]) -> list[Result]:
    """The texts of all rows; one alone needs no batch."""
    if len(requests) == 1:
        [(prompt, config)] = requests
        return [Run(pair, prompt, config, keep=True).complete().result]
    return pair.batch(requests)


def _sequences(input_ids: Tensor, results: Sequence[Result], pad: int) -> Tensor:
    """Prompts and new tokens, padded on the right."""
    longest = max((len(result.tokens) for result in results), default=0)
    new = [[*result.tokens, *[pad] * (longest - len(result.tokens))] for result in results]
    new_BR = torch.tensor(new, dtype=torch.int64, device=input_ids.device).view(len(results), longest)
    return torch.cat((input_ids, new_BR), dim=1)
