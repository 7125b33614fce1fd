"""The metadata of a forward: one int32 row of columns for every token.

```
column     TOKEN   POSITION  ROW      INDEX           PREFIX               READ         PATH ...
meaning    vocab   RoPE      request  where its KV    indices 0..PREFIX-1  1: its       then PREFIX + each of these
           id      position           goes, -1: none  are visible          output is    is visible, up to the
                                                                           read         first -1
```

An *index* counts the keys of one row; the row's page table turns it into a slot of the cache (page `index
// 16`, offset `index % 16`). A token of a prompt has no path: it sees the prefix that ends with itself. A
tree node sees the committed prefix, then its ancestors and itself. Padding has INDEX -1, PREFIX 0 and READ
0: nothing is stored, seen or read. What a forward returns for a row that is not read is not defined: its
logits, a large part of a small forward, are not computed. layout.h has the same columns for the C++ bodies.
"""

from __future__ import annotations

from typing import Final

__all__ = ["INDEX", "PAGE_LEN", "PATH", "POSITION", "PREFIX", "READ", "ROW", "TOKEN"]

TOKEN: Final = 0
POSITION: Final = 1
ROW: Final = 2
INDEX: Final = 3
PREFIX: Final = 4
READ: Final = 5
PATH: Final = 6

PAGE_LEN: Final = 16
"""Slots per page; one page is also the block of keys that the CPU body scores together."""
