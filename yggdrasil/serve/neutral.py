"""Known fields that the server does not apply: the values that ask for what it does anyway.

A feature that applies a field removes its entry here and declares the field in `openai.py`; a declared
field is never neutral.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from yggdrasil.serve.wire import ApiError

__all__ = ["LABELS", "NEUTRAL", "neutral_only", "without_neutral"]

LABELS = ("user", "safety_identifier", "prompt_cache_key", "request_id")  # name the caller only
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # changes of the distribution
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "include_stop_str_in_output": (False,),
    # other searches
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    # the text
    "suffix": ("",),
    "echo": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    # tools
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    # other answers
    "modalities": (["text"],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    # other services
    "service_tier": ("auto", "default"),
    "priority": (0,),
    "store": (False,),
}


def without_neutral(fields: dict[str, Any], declared: Collection[str]) -> dict[str, Any]:
    """`neutral_only` with this module's table."""
    return neutral_only(fields, declared, NEUTRAL, LABELS)


def neutral_only(
    fields: dict[str, Any],
    declared: Collection[str],
    table: Mapping[str, tuple[Any, ...]],
    labels: Collection[str],
) -> dict[str, Any]:
    """The fields of a request that are declared or unknown.

    Raises:
        ApiError: a field of the table has a value that is not neutral.
    """
    for name, neutral in table.items():
        value = fields.get(name)
        if value is None or name in declared or any(_equal(value, one) for one in neutral):
            continue
        allowed = f" or send {' or '.join(map(repr, neutral))}" if neutral else ""
        message = f"{name} is not supported; leave it out{allowed}"
        raise ApiError(400, message, param=name, code="unsupported_parameter")
    return {
        name: value
        for name, value in fields.items()
        if name in declared or (name not in table and name not in labels)
    }


def _equal(value: Any, neutral: Any) -> bool:
    """Equal, and both or neither true or false: JSON's `false` is not 0. Nulls in an object are nothing."""
    if isinstance(value, dict):
        value = {name: part for name, part in value.items() if part is not None}
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
