"""Messages, tensors and objects from rank 0 to all other ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from yggdrasil.errors import RankLost
from yggdrasil.kernels.gather import use_group
from yggdrasil.ranks.launch import local_rank, num_ranks, rank

__all__ = ["COMMIT", "FORWARD", "LOAD", "STOP", "GroupLink", "Link", "Message"]

STOP, LOAD, FORWARD, COMMIT = range(4)
ANSWER_TIMEOUT = timedelta(minutes=5)  # a rank that takes longer for a forward hangs
IDLE_TIMEOUT = timedelta(days=30)  # followers wait while rank 0 compiles, trains or is idle


class Message(NamedTuple):
    """A command to the followers.

    Args:
        kind: STOP; LOAD, with an object after it; FORWARD, with metadata after it; COMMIT, with a path
            after it.
        first: Tokens of a forward; the index at which a commit's path starts.
        second: Length of a commit's path.
    """

    kind: int
    first: int = 0
    second: int = 0


class Link(Protocol):
    """One end of the connection; every rank makes the same calls in the same order."""

    def message(self, message: Message | None = None) -> Message:
        """Send a message from rank 0; returns it on every rank. Raises RankLost."""
        ...

    def tensor(self, values: Tensor) -> Tensor:
        """Copy rank 0's values into the others' tensor of the same shape and dtype; raises RankLost."""
        ...

    def payload(self, value: Any = None) -> Any:
        """Send a picklable object from rank 0; returns it on every rank. Raises RankLost."""
        ...

    def use_device(self, device: str) -> None:
        """Use "cpu" or "cuda" for tensors and collectives from now on."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class GroupLink:
    """The link over torch.distributed: gloo for messages, and gloo or NCCL (on GPUs) for tensors.

    Cost: one broadcast per message. On CUDA, tensors are broadcast on the current stream, without a sync.
    """

    def __init__(self) -> None:
        try:
            dist.init_process_group("gloo", timeout=ANSWER_TIMEOUT)
            self._messages = dist.new_group(
                backend="gloo", timeout=IDLE_TIMEOUT if rank() else ANSWER_TIMEOUT
            )
        except RuntimeError as error:
            raise _lost(error) from error
        self._tensors: Any = dist.group.WORLD
        self._device = "cpu"

    def message(self, message: Message | None = None) -> Message:
        numbers = torch.tensor(message or Message(STOP), dtype=torch.int64)
        self._broadcast(numbers, self._messages)
        return Message(*numbers.tolist())

    def tensor(self, values: Tensor) -> Tensor:
        self._broadcast(values, self._tensors if values.is_cuda else dist.group.WORLD)
        return values

    def payload(self, value: Any = None) -> Any:
        values = [value]
        try:
            dist.broadcast_object_list(values, src=0, group=self._messages)
        except RuntimeError as error:
            raise _lost(error) from error
        return values[0]

    def use_device(self, device: str) -> None:
        if device == "cuda" and self._device != "cuda":
            torch.cuda.set_device(local_rank())
            self._tensors = dist.new_group(backend="nccl", timeout=ANSWER_TIMEOUT)
        self._device = device
        use_group(self._tensors)

    def close(self) -> None:
        # without a reference the groups end their threads, which could abort the end of the interpreter
        use_group(None)
        self._messages = None
        self._tensors = None
        dist.destroy_process_group()

    def _broadcast(self, values: Tensor, group: Any) -> None:
        try:
            dist.broadcast(values, src=0, group=group)
        except RuntimeError as error:
            raise _lost(error) from error


def _lost(error: RuntimeError) -> RankLost:
    return RankLost(rank(), num_ranks(), str(error))
