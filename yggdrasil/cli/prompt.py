"""The prompt of a command line: words, or standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from yggdrasil.errors import ConfigError, UsageError

__all__ = ["prompt_of"]


def prompt_of(words: Sequence[str], verb: str = "generate") -> str:
    """The words joined by blanks; standard input if the only word is a dash.

    Args:
        verb: For the examples of the errors.

    Raises:
        UsageError: the prompt is missing or empty.
        ConfigError: the prompt is not UTF-8.
    """
    example = f'ygg {verb} "Once upon a time"'
    if not words:
        raise UsageError("a prompt is missing", example)
    is_input = list(words) == ["-"]
    try:
        prompt = sys.stdin.read() if is_input else " ".join(words)
        prompt.encode()  # the shell passes bytes that are not UTF-8 as lone surrogates
    except UnicodeDecodeError as error:
        raise _not_text(error.object[error.start], error.start) from None
    except UnicodeEncodeError as error:
        raise _not_text(
            ord(error.object[error.start]) & 0xFF, len(error.object[: error.start].encode())
        ) from None
    if not prompt:
        piped = f"echo Once upon a time | ygg {verb} -"
        raise UsageError("the prompt is empty", piped if is_input else example)
    return prompt


def _not_text(byte: int, place: int) -> ConfigError:
    return ConfigError("prompt", bytes([byte]), f"text in UTF-8, which byte {place} is not")
