"""The draft's weights in the page pool's memory: how they leave it and come back.

```
pool's memory   | page 0 | page 1 | ... | page K-1 |  draft weights, 64-byte aligned          |     resident
                | page 0 | page 1 | ... | page K-1 | page K | page K+1 | ...                  |     lent
host copy       on the CPU the mapped weight file, on CUDA one pinned image
```
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["DraftMemory", "MemoryState", "weight_bytes"]

ALIGNMENT = 64  # bytes, of every tensor: more than any dtype or copy needs
# On a CPU a chunk is copied between two steps, in a fraction of a step's time.
CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}


class MemoryState(Enum):
    """What the memory holds: the draft, KV pages, or a draft that is being copied back."""

    RESIDENT = "resident"
    LENT = "lent"
    RETURNING = "returning"


def weight_bytes(weights: Mapping[str, Tensor]) -> int:
    """Bytes of the aligned weights; tensors that share memory count once."""
    return _layout(weights)[1]


class DraftMemory:
    """Memory that holds the draft's weights or KV pages.

    Args:
        weights: The draft's weights on the host, the source of every return; mapped files stay mapped.
        memory: At least `weight_bytes(weights)` uint8, aligned, where graphs read the weights.

    Attributes:
        state: What the memory holds.
        weights: The weights in `memory`, by name. Aliasing: graphs are bound to these tensors in every
            state.

    Source: Nightjar section 5.4.
    """

    def __init__(self, weights: Mapping[str, Tensor], memory: Tensor) -> None:
        offsets, num_bytes = _layout(weights)
        assert memory.dtype == torch.uint8
        assert len(memory) >= num_bytes
        assert memory.data_ptr() % ALIGNMENT == 0
        self.weights = {
            name: memory[offsets[_key(tensor)] :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for name, tensor in weights.items()
        }
        self.num_bytes = num_bytes
        self._copies = list(_copies(weights, self.weights, memory[:num_bytes]))
        self._stream = torch.cuda.Stream() if memory.is_cuda else None  # type: ignore[no-untyped-call]
        self._arrived = torch.cuda.Event() if memory.is_cuda else None  # type: ignore[no-untyped-call]
        self._next = 0
        self.state = MemoryState.RETURNING
        self.begin_return_()
        self.finish_()

    def leave_(self) -> None:
        """Give the memory to the pages, at once: the host has a copy of the weights."""
        assert self.state is MemoryState.RESIDENT
        self.state = MemoryState.LENT

    def begin_return_(self) -> None:
        """Take the memory back from the pages and begin to copy the weights.

        Cost: on CUDA one copy per chunk on a separate stream, after all work launched before; no sync. On a
        CPU nothing yet."""
        self.state = MemoryState.RETURNING
        self._next = 0
        if self._stream is not None and self._arrived is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for host, device in self._copies:
                    device.copy_(host, non_blocking=True)
                self._arrived.record(self._stream)

    def advance_(self) -> None:
        """Between two steps: on a CPU copy the next chunk, on CUDA check whether all copies are done."""
        assert self.state is MemoryState.RETURNING
        if self._arrived is not None:
            is_complete = bool(self._arrived.query())  # type: ignore[no-untyped-call]
        else:
            host, device = self._copies[self._next]
            device.copy_(host)
            self._next += 1
            is_complete = self._next == len(self._copies)
        if is_complete:
            self.state = MemoryState.RESIDENT

    def finish_(self) -> None:
        """Wait until the draft is complete; called only when no request waits."""
        while self.state is MemoryState.RETURNING:
            if self._arrived is not None:
                self._arrived.synchronize()  # sync: no request waits
            self.advance_()


def _key(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def _layout(weights: Mapping[str, Tensor]) -> tuple[dict[tuple[int, int], int], int]:
    """Offset of every tensor, the same for tied ones, and the end."""
    offsets: dict[tuple[int, int], int] = {}
    end = 0
    for tensor in weights.values():
        if _key(tensor) not in offsets:
            offsets[_key(tensor)] = end
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _copies(
    weights: Mapping[str, Tensor], placed: Mapping[str, Tensor], memory: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """The copies that bring the weights back, chunk by chunk: (host bytes, bytes of `memory`)."""
    pairs = {
        placed[name].data_ptr(): (_bytes(tensor), _bytes(placed[name])) for name, tensor in weights.items()
    }
    if memory.is_cuda:
        image = torch.empty(len(memory), dtype=torch.uint8, pin_memory=True)
        for address, (host, _) in pairs.items():
            image[address - memory.data_ptr() :][: len(host)] = host
        pairs = {memory.data_ptr(): (image, memory)}
    chunk = CHUNK_BYTES[memory.device.type]
    bounds = {address: [*range(0, len(host), chunk), len(host)] for address, (host, _) in pairs.items()}
    return [
        (host[start:end], device[start:end])
        for address, (host, device) in pairs.items()
        for start, end in pairwise(bounds[address])
    ]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
