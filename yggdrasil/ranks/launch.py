"""The rank of this process, from torchrun's environment variables; does not import torch."""

from __future__ import annotations

import os

from yggdrasil.errors import ConfigError

__all__ = ["local_rank", "num_ranks", "rank"]


def num_ranks() -> int:
    """Processes that share the target; 1 without torchrun.

    Raises:
        ConfigError: a variable is not a number.
    """
    return _number("WORLD_SIZE", "at least 1") if _launched() else 1


def rank() -> int:
    """Number of this process: 0 leads, the others follow."""
    return _number("RANK", "a rank") if _launched() else 0


def local_rank() -> int:
    """Number of this process on its machine, and of its GPU."""
    return _number("LOCAL_RANK", "a rank") if "LOCAL_RANK" in os.environ else rank()


def _launched() -> bool:
    """Whether torchrun started this process; a cluster may set one of the variables itself."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _number(name: str, allowed: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise ConfigError(name, text, allowed)
    return int(text)
