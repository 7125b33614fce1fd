"""The number of threads that operators run on.

Our operators have their own pool, which lets other processes run. In a step torch's operators run on one
thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from yggdrasil.errors import ConfigError
from yggdrasil.kernels.build import kernel_library

__all__ = ["MOST_THREADS", "get_num_threads", "one_torch_thread", "set_num_threads", "stay_alone"]

MOST_THREADS = 256  # the size of the pool in threads.cpp


def get_num_threads() -> int:
    """Most threads of one of our operators, the calling one included; at first torch's number."""
    count: int = kernel_library().ygg_num_threads()
    return count


def set_num_threads(count: int) -> None:
    """Let operators run on at most `count` threads, ours always and torch's outside a step.

    The setting is for the whole process. It changes no bit of a result.

    Raises:
        ConfigError: not from 1 to 256.
    """
    if not 1 <= count <= MOST_THREADS:
        raise ConfigError("threads", count, f"from 1 to {MOST_THREADS}")
    torch.set_num_threads(count)
    if kernel_library.cache_info().currsize:  # else the library starts with torch's number
        kernel_library().ygg_set_num_threads(count)


def stay_alone() -> None:
    """From now on run the operators that the calling thread calls on that thread alone."""
    torch.set_num_threads(1)
    # the first call fixes the thread's number; a later one would take the number set by then
    torch.get_num_threads()
    kernel_library().ygg_stay_alone()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """A block in which torch's own operators run on the calling thread.

    OpenMP's threads spin for milliseconds after each operator, and hold the core that our threads or
    another process needs. A step has only a few small operators of torch. Cost: a microsecond.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
