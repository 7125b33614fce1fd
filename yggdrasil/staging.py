"""Small host data for a device, handed over without waiting for the device.

A copy from ordinary memory makes the host wait until the stream has come that far; one from pinned memory
does not. torch hands pinned memory out again only when the copies from it are done, so nothing here keeps
or reuses a buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["send_", "staged_like", "upload"]


def upload(
    values: Sequence[int] | Sequence[Sequence[int]],
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Integers as a tensor of a device.

    Args:
        values: Equally long rows, or one row.
        device: "cpu" makes an ordinary tensor.
        dtype: Of the result.

    Cost: one small copy; no sync.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def staged_like(target: Tensor) -> Tensor:
    """Uninitialised host memory of the shape and dtype of a device's tensor, to be filled and given to
    `send_`.
    """
    return torch.empty(target.shape, dtype=target.dtype, pin_memory=True)


def send_(target: Tensor, staged: Tensor) -> None:
    """Copy what `staged_like` made into its device tensor. Cost: one copy on the current stream; no sync."""
    target.copy_(staged, non_blocking=True)
