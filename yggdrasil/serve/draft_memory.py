"""The room that the draft's weights take in the page pool's memory, and how they leave it and come back.

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

__all__ = ["DraftRoom", "Tenant", "room_bytes"]

ALIGNMENT = 64  # of every tensor in the room: more than any dtype or copy asks for
# on a CPU a chunk is copied between two steps: a fraction of one
CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}


class Tenant(Enum):
    """Who has the room."""

    DRAFT = "draft"
    PAGES = "pages"
    RETURNING = "returning"


def room_bytes(weights: Mapping[str, Tensor]) -> int:
    """What the weights take, aligned; those that share memory once."""
    return _layout(weights)[1]


class DraftRoom:
    """Bytes whose tenant is the draft, or KV pages.

    Args:
        weights: The draft's, on the host: mapped files stay mapped and are the copy that it comes back
            from.
        memory: At least `room_bytes(weights)` uint8, where graphs will read them; aligned.

    Attributes:
        tenant: Whose bytes they are.
        weights: The same weights in the room, by name. Aliasing: these are the tensors that graphs are
            bound to, whichever tenant has the memory.

    Source: Nightjar section 5.4.
    """

    def __init__(self, weights: Mapping[str, Tensor], memory: Tensor) -> None:
        places, num_bytes = _layout(weights)
        assert (
            memory.dtype == torch.uint8 and len(memory) >= num_bytes and memory.data_ptr() % ALIGNMENT == 0
        )
        self.weights = {
            name: memory[places[_key(tensor)] :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for name, tensor in weights.items()
        }
        self.num_bytes = num_bytes
        self._copies = list(_copies(weights, self.weights, memory[:num_bytes]))
        self._stream = torch.cuda.Stream() if memory.is_cuda else None  # type: ignore[no-untyped-call]
        self._arrived = torch.cuda.Event() if memory.is_cuda else None  # type: ignore[no-untyped-call]
        self._next = 0
        self.tenant = Tenant.RETURNING
        self.begin_return_()
        self.finish_()

    def leave_(self) -> None:
        """The bytes are the pages' from now on: at once, for the host has a copy."""
        assert self.tenant is Tenant.DRAFT
        self.tenant = Tenant.PAGES

    def begin_return_(self) -> None:
        """Dispatch the weights' way back; the bytes are no page's any more.

        Cost: on CUDA a copy a chunk on a stream of its own, after what was launched before; no sync. On a
        CPU nothing yet."""
        self.tenant = Tenant.RETURNING
        self._next = 0
        if self._stream is not None and self._arrived is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for host, device in self._copies:
                    device.copy_(host, non_blocking=True)
                self._arrived.record(self._stream)

    def advance_(self) -> None:
        """Between two steps: on a CPU copy the next chunk, on CUDA ask whether all have arrived."""
        assert self.tenant is Tenant.RETURNING
        if self._arrived is not None:
            is_whole = bool(self._arrived.query())  # type: ignore[no-untyped-call]
        else:
            host, device = self._copies[self._next]
            device.copy_(host)
            self._next += 1
            is_whole = self._next == len(self._copies)
        if is_whole:
            self.tenant = Tenant.DRAFT

    def finish_(self) -> None:
        """Wait until the draft is whole: when nobody else waits, it may take its time."""
        while self.tenant is Tenant.RETURNING:
            if self._arrived is not None:
                self._arrived.synchronize()  # sync: nobody waits for anything else
            self.advance_()


def _key(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def _layout(weights: Mapping[str, Tensor]) -> tuple[dict[tuple[int, int], int], int]:
    """Where every tensor begins, tied ones at one place, and the end."""
    places: dict[tuple[int, int], int] = {}
    end = 0
    for tensor in weights.values():
        if _key(tensor) not in places:
            places[_key(tensor)] = end
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return places, end


def _copies(
    weights: Mapping[str, Tensor], placed: Mapping[str, Tensor], memory: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """What brings the weights back, chunk by chunk: (host bytes, bytes of the room)."""
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
