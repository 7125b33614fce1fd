"""Which process of a run this is, from torchrun's environment variables. Importing it costs nothing: the
command line asks before torch is there.
"""

from __future__ import annotations

import os

from yggdrasil.errors import ConfigError

__all__ = ["local_rank", "num_ranks", "rank"]


def num_ranks() -> int:
    """Processes that share the target; 1 where torchrun did not start this one.

    Raises:
        ConfigError: the environment holds something else than numbers.
    """
    return _number("WORLD_SIZE", "at least 1") if _launched() else 1


def rank() -> int:
    """The number of this process: 0 leads, the others follow."""
    return _number("RANK", "a rank") if _launched() else 0


def local_rank() -> int:
    """Its number on this machine, which is that of its GPU."""
    return _number("LOCAL_RANK", "a rank") if "LOCAL_RANK" in os.environ else rank()


def _launched() -> bool:
    """Both: a cluster may set one of them for purposes of its own."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _number(name: str, allowed: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise ConfigError(name, text, allowed)
    return int(text)
