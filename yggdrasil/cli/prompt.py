"""The prompt of a command line: words, or standard input."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from yggdrasil.errors import ConfigError, UsageError

__all__ = ["prompt_of", "unreadable_input"]


def prompt_of(words: Sequence[str], verb: str = "generate") -> str:
    """The words joined by blanks; standard input if the only word is a dash.

    Args:
        verb: For the examples of the errors.

    Raises:
        UsageError: the prompt is missing or empty, or standard input cannot be read.
        ConfigError: the prompt is not UTF-8.
    """
    example = f'ygg {verb} "Once upon a time"'
    if not words:
        raise UsageError("a prompt is missing", example)
    is_input = list(words) == ["-"]
    piped = f"echo Once upon a time | ygg {verb} -"
    try:
        prompt = sys.stdin.read() if is_input else " ".join(words)
        prompt.encode()  # the shell passes bytes that are not UTF-8 as lone surrogates
    except UnicodeDecodeError as error:
        raise _not_text(error.object[error.start], error.start) from None
    except UnicodeEncodeError as error:
        raise _not_text(
            ord(error.object[error.start]) & 0xFF, len(error.object[: error.start].encode())
        ) from None
    except OSError as error:
        raise unreadable_input(error, piped) from None
    if not prompt:
        raise UsageError("the prompt is empty", piped if is_input else example)
    return prompt


def unreadable_input(error: OSError, command: str) -> UsageError:
    """The error for a standard input that cannot be read."""
    reason = os.strerror(error.errno or errno.EBADF).lower()
    return UsageError(f"standard input cannot be read ({reason})", command)


def _not_text(byte: int, place: int) -> ConfigError:
    return ConfigError("prompt", bytes([byte]), f"text in UTF-8, which byte {place} is not")
