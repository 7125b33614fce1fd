"""The errors a user can cause; everything else keeps its traceback.

```
YggError
├── UsageError         a command line or a call that cannot be: what is wrong with it, and one that is right
├── ConfigError        an option or an argument: names the field, the value and what is allowed
├── ModelMismatch      target and draft do not share a vocabulary: names both
├── UnsupportedModel   an architecture we would decode wrongly: names the feature
├── BrokenCheckpoint   a model's files are not whole, or do not fit its configuration: path, problem, remedy
├── ArtifactError      a compiled file is missing, stale or corrupt: path, field, command
├── StoreError         a file cannot be written: path, reason, remedy
├── ShapeNotCompiled   more tokens than the menu of static graphs holds: names the menu
├── CapacityError      the context or a pool is full: needed and free
├── QueueFull          a server has more waiting requests than it holds: how many, and when to try again
├── ServiceEnded       a server that decodes no more: what to do
└── RankLost           another process of this run is gone, with the error of the connection
```

The command line prints the message on one line and exits with 2.
"""

from __future__ import annotations

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


SHOWN = reprlib.Repr()  # of a value that is refused: a client may have sent megabytes
SHOWN.maxstring = SHOWN.maxother = 300
SHOWN.maxlong = 60
SHOWN.maxlist = SHOWN.maxtuple = SHOWN.maxset = SHOWN.maxdict = 20


def first_line(error: Exception) -> str:
    """What another library's error tells in its first line; its class where it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class YggError(Exception):
    """Base of every error that a user can cause and fix."""


class UsageError(YggError):
    """A command line that lacks something, or has what does not go together."""

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
        """The same error where the field has another name, such as that of an option."""
        return ConfigError(field, *self._rest)


class ModelMismatch(YggError):
    """Target and draft cannot speculate together."""

    def __init__(self, what: str, target: object, draft: object) -> None:
        super().__init__(
            f"{what} differs: the target has {target}, the draft has {draft}; speculation needs a draft "
            "with the target's own tokenizer"
        )


class UnsupportedModel(YggError):
    """A model that this runtime does not decode correctly, so it does not decode it at all."""

    def __init__(self, model: str, feature: str) -> None:
        super().__init__(
            f"{model}: {feature} is not supported; supported are decoder-only models with full causal "
            "attention and heads of 16, 32, ... features"
        )


class BrokenCheckpoint(YggError):
    """Files of a model that cannot be used as they are."""

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
            f"no compiled graph takes {num_tokens} tokens; the menu is {sorted(menu)}; compile with a "
            "larger one"
        )


class CapacityError(YggError):
    """Not enough room."""

    def __init__(self, what: str, needed: int, free: int, fix: str) -> None:
        super().__init__(f"{what}: {needed} needed, {free} free; {fix}")


class QueueFull(YggError):
    """A request that a server does not take on now."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(
            f"{waiting} requests are waiting already, no more are queued; try again in "
            f"{retry_after_s:.0f} s, or serve with a larger --max-queue"
        )
        self.retry_after_s = retry_after_s


class ServiceEnded(YggError):
    """A server whose decoding thread has ended, or died."""

    def __init__(self) -> None:
        super().__init__(
            "the decoding thread does not run, no request is taken; the server's log has the reason, start "
            "`ygg serve` again"
        )


class RankLost(YggError):
    """Another process of this run is gone, or does not answer."""

    def __init__(self, rank: int, num_ranks: int, reason: str) -> None:
        super().__init__(
            f"rank {rank} of {num_ranks} lost another one, which may have printed the reason above: "
            f"{reason.strip().splitlines()[0]}; start the run again"
        )
