"""The prompt of a command line: words, or standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from yggdrasil.errors import ConfigError, UsageError

__all__ = ["prompt_of"]

EXAMPLE = 'ygg generate "Once upon a time"'


def prompt_of(words: Sequence[str]) -> str:
    """The words as one text, a blank between each two; standard input where the only one is a dash.

    Raises:
        UsageError: there is none.
        ConfigError: it is not UTF-8.
    """
    if not words:
        raise UsageError("a prompt is missing", EXAMPLE)
    is_input = list(words) == ["-"]
    try:
        prompt = sys.stdin.read() if is_input else " ".join(words)
        prompt.encode()  # bytes that are no text come as half of a pair of surrogates
    except UnicodeDecodeError as error:
        raise _not_text(error.object[error.start], error.start) from None
    except UnicodeEncodeError as error:
        raise _not_text(
            ord(error.object[error.start]) & 0xFF, len(error.object[: error.start].encode())
        ) from None
    if not prompt:
        raise UsageError(
            "the prompt is empty", "echo Once upon a time | ygg generate -" if is_input else EXAMPLE
        )
    return prompt


def _not_text(byte: int, place: int) -> ConfigError:
    return ConfigError("prompt", bytes([byte]), f"text in UTF-8, which byte {place} is not")
