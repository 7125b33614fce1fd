"""Copy small host data to a device without waiting for the device.

A copy from ordinary memory makes the host wait until the stream reaches the copy; a copy from pinned memory
does not. torch reuses pinned memory only after the copies from it are done, so no buffer is kept here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["send", "send_", "staged_like", "upload"]


def upload(
    values: Sequence[float] | Sequence[Sequence[int]],
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Numbers as a tensor on a device, integers by default.

    Args:
        values: Rows of equal length, or one row.
        device: "cpu" makes an ordinary tensor.

    Cost: one small copy; no sync.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def send(host: Tensor, device: str) -> Tensor:
    """A tensor of the host on a device; the same tensor for "cpu". Cost: one copy, no sync."""
    return host if device == "cpu" else host.pin_memory().to(device, non_blocking=True)


def staged_like(target: Tensor) -> Tensor:
    """Uninitialised pinned host memory with the shape and dtype of `target`, to be filled for `send_`."""
    return torch.empty(target.shape, dtype=target.dtype, pin_memory=True)


def send_(target: Tensor, staged: Tensor) -> None:
    """Copy `staged_like` memory to its device tensor. Cost: one copy on the current stream; no sync."""
    target.copy_(staged, non_blocking=True)
