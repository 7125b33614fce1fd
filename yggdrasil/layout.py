"""The metadata of a forward: one int32 row per token.

```
column     TOKEN   POSITION  ROW      INDEX           PREFIX               READ      PATH ...
meaning    vocab   RoPE      request  where its KV    indices 0..PREFIX-1  above 0:  then PREFIX + each of
           id      position           goes, -1: none  are visible          output    these is visible, up
                                                                           is read   to the first -1
```

An *index* counts the keys of one row; the row's page table maps it to a slot of the cache (entry `index //
16`, offset `index % 16`). A token of a prompt has no path: it sees the prefix that ends with itself. A tree
node sees the committed prefix, then its ancestors and itself. Padding has INDEX -1, PREFIX 0 and READ 0: it
stores, sees and returns nothing. The output of a row that is not read is undefined: its logits, a large
part of a small forward, are not computed. READ_WIDE asks a draft for many next tokens, from which noise
chooses (step/coupling.py), READ_BEST for the few likeliest. kernels/layout.h has the same constants for
C++.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "INDEX",
    "PAGE_LEN",
    "PATH",
    "POSITION",
    "PREFIX",
    "READ",
    "READ_BEST",
    "READ_WIDE",
    "ROW",
    "TOKEN",
]

TOKEN: Final = 0
POSITION: Final = 1
ROW: Final = 2
INDEX: Final = 3
PREFIX: Final = 4
READ: Final = 5
PATH: Final = 6

READ_BEST: Final = 1
READ_WIDE: Final = 2

PAGE_LEN: Final = 16
"""Slots of a page. The CPU body scores the keys of a page together."""
