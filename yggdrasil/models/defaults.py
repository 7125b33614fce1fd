"""What a model's own configuration asks of decoding: where a text ends, and settings that transformers
would apply to every request.
"""

from __future__ import annotations

from typing import Any, Final

from yggdrasil.errors import BrokenCheckpoint
from yggdrasil.models.hub import read_json

__all__ = ["end_tokens", "unapplied_defaults"]

FILE = "generation_config.json"
OPTIONS: Final = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None}
"""Options of a request, with transformers' own defaults; they count where it would sample."""

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
"""Settings that change the text and have no equivalent here, with the value that changes nothing."""


def end_tokens(name: str, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a text: generation_config.json's; where it names none, those of config.json and of the
    tokenizer.

    Raises:
        BrokenCheckpoint: generation_config.json does not read, or its end tokens are no ids.
    """
    own = (read_json(name, FILE) or {}).get("eos_token_id")
    if own is not None:
        return _ids(name, FILE, own)
    return tuple(
        dict.fromkeys(
            (
                *_ids(name, "config.json", config.eos_token_id),
                *_ids(name, "the tokenizer", tokenizer.eos_token_id),
            )
        )
    )


def _ids(name: str, origin: str, value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise BrokenCheckpoint(
            name, f"eos_token_id of {origin} is {value!r}, where ids of tokens are wanted", "correct it"
        )
    return tuple(ids)


def unapplied_defaults(name: str) -> str:
    """What generation_config.json sets and decoding here does not apply, as a sentence; empty where there
    is nothing.
    """
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
