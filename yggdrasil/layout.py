"""The metadata of a forward: one int32 row of columns for every token.

```
column     TOKEN   POSITION  ROW      INDEX           PREFIX             PATH ...
meaning    vocab   RoPE      request  where its KV    indices 0..PREFIX-1  then PREFIX + each of these,
           id      position           goes, -1: none  are visible          up to the first -1
```

An *index* counts the keys of one row; the row's page table turns it into a slot of the cache (page `index // 16`, offset
`index % 16`). A token of a prompt has no path: it sees the prefix that ends with itself. A tree node sees the committed
prefix, then its ancestors and itself. Padding has INDEX -1 and PREFIX 0: nothing is stored and nothing is seen.
attention.cpp and the Triton body read the same columns.
"""

from __future__ import annotations

from typing import Final

__all__ = ["INDEX", "PAGE_LEN", "PATH", "POSITION", "PREFIX", "ROW", "TOKEN"]

TOKEN: Final = 0
POSITION: Final = 1
ROW: Final = 2
INDEX: Final = 3
PREFIX: Final = 4
PATH: Final = 5

PAGE_LEN: Final = 16
"""Slots per page; one page is also the block of keys that the CPU body scores together."""
