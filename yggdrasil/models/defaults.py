"""Decoding settings that come with a model: end tokens, and defaults that are not applied here."""

from __future__ import annotations

from typing import Any, Final

from yggdrasil.errors import BrokenCheckpoint
from yggdrasil.models.hub import read_json

__all__ = ["end_tokens", "unapplied_defaults"]

FILE = "generation_config.json"
OPTIONS: Final = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None}
"""Options of a request with transformers' defaults; they have an effect only if the model samples."""

PROCESSORS: Final = {
    "bad_words_ids": None,
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
    "min_new_tokens": None,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": None,
    "renormalize_logits": False,
    "repetition_penalty": 1.0,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
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


def unapplied_defaults(name: str) -> str:
    """A sentence with the settings of generation_config.json that are not applied here; empty if none."""
    settings = read_json(name, FILE) or {}
    processors = _set(settings, PROCESSORS)
    options = _set(settings, OPTIONS) if settings.get("do_sample") else []
    if not processors and not options:
        return ""
    parts = [f"{', '.join(processors)} (there is no such option yet)"] if processors else []
    parts += [f"{', '.join(options)} (give them with each request)"] if options else []
    return f"{FILE} of the target sets {'; '.join(parts)}: not applied"


def _set(settings: dict[str, Any], neutral: dict[str, Any]) -> list[str]:
    return [
        f"{key}={settings[key]}"
        for key in sorted(neutral.keys() & settings.keys())
        if settings[key] is not None and settings[key] != neutral[key]
    ]
