"""A chunk that is split reads the same tokens."""

from __future__ import annotations

import pytest

from yggdrasil.models.packing import Chunk


@pytest.mark.parametrize("num_read", (None, 0, 1, 3, 7))
@pytest.mark.parametrize("length", (1, 2, 4, 7))
def test_parts_of_a_chunk_read_the_tokens_that_the_whole_reads(num_read: int | None, length: int) -> None:
    whole = Chunk(2, range(50, 57), 30, num_read)
    parts = [whole.part(start, length) for start in range(0, 7, length)]
    flags = [
        index >= len(part.tokens) - part.read_len for part in parts for index in range(len(part.tokens))
    ]
    assert flags == [index >= 7 - whole.read_len for index in range(7)]
    assert [token for part in parts for token in part.tokens] == list(range(50, 57))
    assert [part.start_pos for part in parts] == list(range(30, 37, length))
