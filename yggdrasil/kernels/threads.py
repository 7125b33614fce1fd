"""How many threads operators run on: our own, from a pool that lets other processes run, and in a step none
of torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from yggdrasil.errors import ConfigError
from yggdrasil.kernels.build import kernel_library

__all__ = ["MOST_THREADS", "get_num_threads", "one_torch_thread", "set_num_threads", "stay_alone"]

MOST_THREADS = 256  # kernels/threads.cpp has room for no more


def get_num_threads() -> int:
    """Most threads that an operator of ours runs on, the calling one included. At first as many as torch
    has.
    """
    count: int = kernel_library().ygg_num_threads()
    return count


def set_num_threads(count: int) -> None:
    """Let operators run on at most `count` threads, for the whole process: ours, and torch's outside of a
    step.

    Which thread computes what changes no bit, so the text does not depend on it.

    Raises:
        ConfigError: not from 1 to 256.
    """
    if not 1 <= count <= MOST_THREADS:
        raise ConfigError("threads", count, f"from 1 to {MOST_THREADS}")
    torch.set_num_threads(count)
    if kernel_library.cache_info().currsize:  # else it begins with torch's number when it is loaded
        kernel_library().ygg_set_num_threads(count)


def stay_alone() -> None:
    """Let the operators that the calling thread calls from now on run on that thread alone, ours and
    torch's.
    """
    torch.set_num_threads(1)
    # the first question settles a thread's number; later it would take what is set by then
    torch.get_num_threads()
    kernel_library().ygg_stay_alone()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """A block in which torch's own operators run on the calling thread.

    OpenMP's threads spin for milliseconds after each of them, and hold the core that ours or another
    process needs. A step has only a few small operators of torch's. Cost: a microsecond."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
