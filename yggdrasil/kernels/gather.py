"""`ygg::gather_ranks`: the only collective inside graphs; every rank gets the tensors of all ranks.

A sum over ranks gathers and then adds in the order of the ranks. An all-reduce may add in an order that
depends on the size of a tensor, and then a token would have other bits in a wide graph than in a narrow
one. With few tokens the message is short, and an all-reduce would save nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["failure", "use_group"]

_group: Any = None
_failure = ""


def use_group(group: Any) -> None:
    """Gather over this process group from now on; gloo for tensors on a CPU, NCCL on CUDA."""
    global _group, _failure
    _group = group
    _failure = ""


def failure() -> str:
    """The message of the last gather that failed, or an empty string.

    A compiled graph raises a different error.
    """
    return _failure


def _gather_ranks(x: Tensor, num_ranks: int) -> Tensor:
    global _failure
    parts = x.new_empty(num_ranks, *x.shape)
    try:
        dist.all_gather(list(parts.unbind()), x.contiguous(), group=_group)
    except RuntimeError as error:
        _failure = str(error)
        raise
    return parts


def _gather_ranks_fake(x: Tensor, num_ranks: int) -> Tensor:
    return x.new_empty(num_ranks, *x.shape)


torch.library.define("ygg::gather_ranks", "(Tensor x, int num_ranks) -> Tensor")
torch.library.impl("ygg::gather_ranks", ("CPU", "CUDA"), _gather_ranks)
torch.library.register_fake("ygg::gather_ranks", _gather_ranks_fake)
