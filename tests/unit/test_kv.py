"""The KV cache as a transaction: committed tokens are kept, others are dropped.

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = head features.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from yggdrasil.errors import CapacityError
from yggdrasil.kv import KVCache, KVShape, KVStorage
from yggdrasil.page_order import by_slot

pytestmark = pytest.mark.usefixtures("kernels")

SHAPE = KVShape(num_layers=2, num_kv_heads=3, head_dim=4, capacity=32)


def filled(committed: int) -> KVCache:
    """A cache whose every number differs, with `committed` indices."""
    cache = KVCache(SHAPE, dtype=torch.float32, device="cpu")
    cache.storage_PL2GSF.copy_(torch.arange(cache.storage_PL2GSF.numel()).view_as(cache.storage_PL2GSF))
    cache.len = committed
    return cache


def slots(storage_PL2GSF: torch.Tensor) -> torch.Tensor:
    """(layers x 2 x G, slots, F): the same numbers slot by slot."""
    return by_slot(storage_PL2GSF).permute(1, 2, 3, 0, 4, 5).reshape(-1, SHAPE.capacity, SHAPE.head_dim)


def test_a_fresh_cache_is_empty_and_its_pages_are_the_identity() -> None:
    cache = KVCache(SHAPE, dtype=torch.bfloat16, device="cpu")
    assert (cache.len, cache.num_free, cache.storage_PL2GSF.dtype) == (0, 32, torch.bfloat16)
    assert cache.pages_BP.tolist() == [[0, 1]]


def test_commit_of_a_chain_moves_nothing() -> None:
    cache = filled(5)
    before = filled(5).storage_PL2GSF
    cache.commit_([0, 1, 2])
    assert cache.len == 8
    assert torch.equal(cache.storage_PL2GSF, before)


def test_commit_of_a_path_keeps_its_bytes() -> None:
    cache = filled(5)
    before = filled(5).storage_PL2GSF
    cache.commit_([0, 2, 5])
    assert cache.len == 8
    assert torch.equal(slots(cache.storage_PL2GSF)[:, :8], slots(before)[:, [0, 1, 2, 3, 4, 5, 7, 10]])


def test_commit_of_nothing_changes_nothing() -> None:
    cache = filled(5)
    before = filled(5).storage_PL2GSF
    cache.commit_([])
    assert cache.len == 5
    assert torch.equal(cache.storage_PL2GSF, before)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 20), st.sets(st.integers(0, 11)))
def test_commit_of_any_ascending_path_keeps_history_and_path(committed: int, offsets: set[int]) -> None:
    cache = filled(committed)
    before = filled(committed).storage_PL2GSF
    path = sorted(offsets)
    cache.commit_(path)
    assert cache.len == committed + len(path)
    kept = [*range(committed), *(committed + offset for offset in path)]
    assert torch.equal(slots(cache.storage_PL2GSF)[:, : cache.len], slots(before)[:, kept])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 20), st.sets(st.integers(0, 11)), st.permutations(range(5)), st.integers(0, 1))
def test_a_row_keeps_a_path_wherever_its_pages_are(
    start: int, offsets: set[int], order: list[int], row: int
) -> None:
    """Four of five pages, two a row; the other row and the spare page stay as they are."""
    pages_BP = torch.tensor(order[:4], dtype=torch.int32).view(2, 2)
    storage = KVStorage(SHAPE, num_pages=5, pages_BP=pages_BP, dtype=torch.float32, device="cpu")
    storage.storage_PL2GSF.copy_(
        torch.arange(storage.storage_PL2GSF.numel()).view_as(storage.storage_PL2GSF)
    )
    before = storage.storage_PL2GSF.clone()
    path = sorted(offsets)
    storage.keep_(row, start, path)
    pages = pages_BP[row].long()
    kept = [*range(start), *(start + offset for offset in path)]
    assert torch.equal(
        slots(storage.storage_PL2GSF[pages])[:, : start + len(path)], slots(before[pages])[:, kept]
    )
    after = storage.storage_PL2GSF
    others = [page for page in range(5) if page not in pages]
    assert torch.equal(after[others], before[others])
    rest = range(start + len(path), SHAPE.capacity)
    assert torch.equal(slots(after[pages])[:, rest], slots(before[pages])[:, rest])


def test_rollback_forgets_indices_and_touches_no_byte() -> None:
    cache = filled(9)
    before = filled(9).storage_PL2GSF
    cache.rollback_(4)
    assert (cache.len, cache.num_free) == (4, 28)
    assert torch.equal(cache.storage_PL2GSF, before)


@pytest.mark.parametrize("length", (-1, 10))
def test_rollback_only_goes_back(length: int) -> None:
    with pytest.raises(AssertionError):
        filled(9).rollback_(length)


def test_reserve_names_what_is_needed_and_what_is_free() -> None:
    cache = filled(30)
    cache.reserve(2)
    with pytest.raises(CapacityError, match="3 needed, 2 free.*--max-context"):
        cache.reserve(3)
