"""How a page holds the keys and values of 16 slots on a CPU: in the order in which attention reads them.

A word is 32 bits: two numbers in bfloat16, one in float32.

```
keys    word 0 of slots 0 to 15, word 1 of slots 0 to 15, ...         in both dtypes
values  of slots 0 and 1 feature 0, feature 1, ...; of slots 2 and 3  in bfloat16
        all features of slot 0, all of slot 1, ...                    in float32
```

So a vector of keys has the same word of 16 keys, and a vector of values some features of two keys. Nothing
has to be rearranged in a step. On CUDA a page has slot after slot. kernels/page_order.h is the same for
C++.

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = head features; X = P, L and G.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["by_slot", "in_pages"]


def by_slot(pages_PL2GSF: Tensor) -> Tensor:
    """The keys and values of pages, slot after slot. A copy; on CUDA the pages themselves.

    Args:
        pages_PL2GSF: (pages, layers, key or value, G, 16, F) as `KVStorage` has them.
    """
    if pages_PL2GSF.is_cuda:
        return pages_PL2GSF
    keys_XSF, values_XSF = pages_PL2GSF.unbind(2)
    numbers = _numbers_of_word(pages_PL2GSF)
    *others, num_slots, dim = keys_XSF.shape
    words = keys_XSF.reshape(*others, dim // numbers, num_slots, numbers).transpose(-3, -2)
    pairs = values_XSF.reshape(*others, num_slots // numbers, dim, numbers).transpose(-2, -1)
    return torch.stack([words.reshape(keys_XSF.shape), pairs.reshape(keys_XSF.shape)], 2)


def in_pages(slots_PL2GSF: Tensor) -> Tensor:
    """Keys and values that lie slot after slot, as the pages of `KVStorage` have them: undoes `by_slot`."""
    if slots_PL2GSF.is_cuda:
        return slots_PL2GSF
    keys_XSF, values_XSF = slots_PL2GSF.unbind(2)
    numbers = _numbers_of_word(slots_PL2GSF)
    *others, num_slots, dim = keys_XSF.shape
    words = keys_XSF.reshape(*others, num_slots, dim // numbers, numbers).transpose(-3, -2)
    pairs = values_XSF.reshape(*others, num_slots // numbers, numbers, dim).transpose(-2, -1)
    return torch.stack([words.reshape(keys_XSF.shape), pairs.reshape(keys_XSF.shape)], 2)


def _numbers_of_word(x: Tensor) -> int:
    return 4 // x.itemsize
