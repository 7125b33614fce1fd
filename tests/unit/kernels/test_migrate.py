"""Pages move with all their bytes, and impossible migrations are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from yggdrasil.kernels.migrate import move_pages_


def test_moved_pages_equal_a_storage_written_by_hand() -> None:
    storage = torch.arange(24).view(6, 2, 2)
    move_pages_(storage, [5, 3], [1, 2])
    assert storage[:, 0, 0].tolist() == [0, 20, 12, 12, 16, 20]


def test_numbers_may_come_as_tensors_of_either_width() -> None:
    for dtype in (torch.int32, torch.int64):
        storage = torch.arange(4.0).view(4, 1)
        move_pages_(storage, torch.tensor([3], dtype=dtype), torch.tensor([0], dtype=dtype))
        assert storage.flatten().tolist() == [3, 1, 2, 3]


def test_no_moves_change_nothing() -> None:
    storage = torch.arange(4.0).view(4, 1)
    move_pages_(storage, [], [])
    assert storage.flatten().tolist() == [0, 1, 2, 3]


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(8)), st.integers(0, 4))
def test_targets_get_the_sources_and_other_pages_stay(pages: list[int], count: int) -> None:
    sources = pages[:count]
    targets = pages[count : 2 * count]
    storage = torch.randn(8, 3).bfloat16()
    before = storage.clone()
    move_pages_(storage, sources, targets)
    for page in range(8):
        assert torch.equal(
            storage[page], before[sources[targets.index(page)]] if page in targets else before[page]
        )


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([1, 2], [3], "2 sources and 1 targets"),
        ([1], [4], "page 4 is not among the storage's 4"),
        ([-1], [2], "page -1 is not among"),
        ([0, 1], [3, 3], "a target comes twice"),
        ([0, 1], [1, 2], "page 1 is source and target"),
    ],
)
def test_an_impossible_migration_is_refused(sources: list[int], targets: list[int], message: str) -> None:
    storage = torch.zeros(4, 1)
    with pytest.raises(ValueError, match=message):
        move_pages_(storage, sources, targets)
