"""The errors a user can cause; everything else keeps its traceback.

```
YggError
├── UsageError         a wrong command line or call: the problem, and a correct one
├── ConfigError        a wrong option or argument: field, value, allowed values
├── ModelMismatch      target and draft do not share a vocabulary: both values
├── UnsupportedModel   an architecture that would be decoded wrongly: the feature
├── BrokenCheckpoint   a model's files are damaged or do not fit its configuration: path, problem, remedy
├── ArtifactError      a compiled file is missing, stale or corrupt: path, field, command
├── StoreError         a file cannot be written: path, reason, remedy
├── ShapeNotCompiled   more tokens than any compiled graph takes: the menu
├── CapacityError      the context or a pool is full: needed and free
├── QueueFull          a server has too many waiting requests: how many, and when to try again
├── ServiceEnded       a server that no longer decodes: what to do
└── RankLost           another process of this run is gone: the last error of its connection
```

The command line prints the message on one line and exits with 2.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable

__all__ = [
    "ArtifactError",
    "BrokenCheckpoint",
    "CapacityError",
    "ConfigError",
    "ModelMismatch",
    "QueueFull",
    "RankLost",
    "ServiceEnded",
    "ShapeNotCompiled",
    "StoreError",
    "UnsupportedModel",
    "UsageError",
    "YggError",
    "first_line",
]


SHOWN = reprlib.Repr()  # shortens a refused value: a client may have sent megabytes
SHOWN.maxstring = SHOWN.maxother = 300
SHOWN.maxlong = 60
SHOWN.maxlist = SHOWN.maxtuple = SHOWN.maxset = SHOWN.maxdict = 20


def first_line(error: Exception) -> str:
    """First line of an error of another library; its class name if it has no text.

    >>> first_line(ValueError("wrong field 'width':\\n    it is not a number\\nsee the manual"))
    "wrong field 'width': it is not a number"
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


class YggError(Exception):
    """Base of every error that a user can cause and fix."""


class UsageError(YggError):
    """A command line with a missing part, or with parts that exclude each other."""

    def __init__(self, problem: str, command: str) -> None:
        super().__init__(f"{problem}: {command}")


class ConfigError(YggError, ValueError):
    """A value that is not allowed."""

    def __init__(self, field: str, value: object, allowed: str, fix: str = "") -> None:
        message = f"{field}: {SHOWN.repr(value)} is not allowed; it must be {allowed}"
        super().__init__(f"{message}; {fix}" if fix else message)
        self.field = field
        self._rest = value, allowed, fix

    def renamed(self, field: str) -> ConfigError:
        """The same error with another name for the field, such as an option's."""
        return ConfigError(field, *self._rest)


class ModelMismatch(YggError):
    """Target and draft cannot speculate together."""

    def __init__(self, what: str, target: object, draft: object) -> None:
        super().__init__(
            f"{what} differs: the target has {target}, the draft has {draft}; "
            "speculation needs a draft with the target's own tokenizer"
        )


class UnsupportedModel(YggError):
    """A model that this runtime would decode wrongly, so it refuses it."""

    def __init__(self, model: str, feature: str) -> None:
        super().__init__(
            f"{model}: {feature} is not supported; supported are decoder-only models with full causal "
            "attention and heads of 16, 32, ... features"
        )


class BrokenCheckpoint(YggError):
    """Files of a model that cannot be used."""

    def __init__(self, path: object, problem: str, remedy: str = "download the model again") -> None:
        super().__init__(f"{path}: {problem}; {remedy}")


class ArtifactError(YggError):
    """A compiled artifact that cannot be used."""

    def __init__(self, path: object, problem: str, command: str) -> None:
        super().__init__(f"{path}: {problem}; run `{command}`")
        self.problem = f"{problem}; run `{command}`"


class StoreError(YggError):
    """A file that cannot be written."""

    def __init__(self, path: object, problem: str, fix: str) -> None:
        super().__init__(f"{path}: cannot be written ({problem}); {fix}")


class ShapeNotCompiled(YggError):
    """More tokens at once than any compiled graph takes."""

    def __init__(self, num_tokens: int, menu: Iterable[int]) -> None:
        super().__init__(
            f"no compiled graph takes {num_tokens} tokens; the menu is {sorted(menu)}; "
            "compile with a larger one"
        )


class CapacityError(YggError):
    """Not enough room."""

    def __init__(self, what: str, needed: int, free: int, fix: str) -> None:
        super().__init__(f"{what}: {needed} needed, {free} free; {fix}")


class QueueFull(YggError):
    """A request that a server refuses because its queue is full."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(
            f"{waiting} requests are waiting already, no more are queued; "
            f"try again in {math.ceil(retry_after_s)} s, or serve with a larger --max-queue"
        )
        self.retry_after_s = retry_after_s


class ServiceEnded(YggError):
    """A server whose decoding thread has ended."""

    def __init__(self) -> None:
        super().__init__(
            "the decoding thread is not running, no request is accepted; "
            "see the server's log, then start `ygg serve` again"
        )


class RankLost(YggError):
    """Another process of this run has ended or does not answer."""

    def __init__(self, rank: int, num_ranks: int, reason: str) -> None:
        first = reason.strip().splitlines()[0]
        super().__init__(
            f"rank {rank} of {num_ranks} lost another rank, which may have reported why above: {first}; "
            "start the run again"
        )
