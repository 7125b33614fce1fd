"""Decoding settings that come with a model: end tokens, defaults of requests, and what is not applied."""

from __future__ import annotations

from typing import Any, Final

from yggdrasil.config import SamplingConfig
from yggdrasil.errors import BrokenCheckpoint, ConfigError
from yggdrasil.models.gguf import sampling_settings
from yggdrasil.models.hub import read_json
from yggdrasil.store.sources import is_gguf

__all__ = ["end_tokens", "request_defaults", "unapplied_defaults"]

FILE = "generation_config.json"
SAMPLING: Final = ("top_k", "top_p", "min_p")
"""Options that have an effect only if the model samples, under their names here."""

APPLIED: Final = {
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "min_new_tokens": "min_tokens",
}
"""Processors of transformers by their names here."""

PROCESSORS: Final = {
    "begin_suppress_tokens": None,
    "diversity_penalty": 0.0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "length_penalty": 1.0,
    "min_length": 0,
    "num_beams": 1,
    "penalty_alpha": None,
    "renormalize_logits": False,
    "sequence_bias": None,
    "stop_strings": None,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}
"""Settings that change the text and have no equivalent here, with the value that has no effect."""


def end_tokens(name: str, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a text, from generation_config.json; if it has none, from config.json and the tokenizer.

    Raises:
        BrokenCheckpoint: generation_config.json is not valid, or an end token is not an id.
    """
    own = (read_json(name, FILE) or {}).get("eos_token_id")
    if own is not None:
        return _ids(name, FILE, own)
    configured = _ids(name, "config.json", config.eos_token_id)
    tokenized = _ids(name, "the tokenizer", tokenizer.eos_token_id)
    return tuple(dict.fromkeys((*configured, *tokenized)))


def _ids(name: str, origin: str, value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        problem = f"eos_token_id of {origin} is {value!r}, not a token id or a list of token ids"
        raise BrokenCheckpoint(name, problem, "correct it")
    return tuple(ids)


def request_defaults(name: str, vocab: int) -> dict[str, Any]:
    """Options of requests that the model's own settings set, by the names of `SamplingConfig.of`.

    Args:
        vocab: V of the pair; banned sequences of tokens beyond it are left out, for they cannot come.

    Raises:
        BrokenCheckpoint: a value that is not allowed.
    """
    settings = _own_settings(name)
    defaults = {here: settings[theirs] for theirs, here in APPLIED.items() if theirs in settings}
    if settings.get("do_sample"):
        defaults["temperature"] = settings.get("temperature", 1.0)
        defaults |= {key: settings[key] for key in SAMPLING if key in settings}
    try:
        suppressed = [[token] for token in settings.get("suppress_tokens", ())]
        banned = [*settings.get("bad_words_ids", ()), *suppressed]
        if known := [tokens for tokens in banned if max(tokens, default=0) < vocab]:
            defaults["banned"] = known
        SamplingConfig.of(defaults)
    except (ConfigError, TypeError, ValueError) as error:
        origin = "sampling" if is_gguf(name) else FILE
        raise BrokenCheckpoint(name, f"{origin}: {error}", "correct it") from None
    return defaults


def unapplied_defaults(name: str) -> str:
    """A sentence with the model's own settings that are not applied here; empty if none."""
    if is_gguf(name):
        origin = "the target"
        unapplied = sampling_settings(name)[1]
    else:
        origin = f"{FILE} of the target"
        unapplied = _without_equivalent(_own_settings(name))
    if not unapplied:
        return ""
    listed = ", ".join(f"{key}={unapplied[key]}" for key in sorted(unapplied))
    return f"{origin} sets {listed}: not applied, there is no such option yet"


def _own_settings(name: str) -> dict[str, Any]:
    """The settings of generation_config.json, or the sampling that a GGUF file asks for."""
    settings = sampling_settings(name)[0] if is_gguf(name) else read_json(name, FILE) or {}
    return {key: value for key, value in settings.items() if value is not None}


def _without_equivalent(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if PROCESSORS.get(key, value) != value}
