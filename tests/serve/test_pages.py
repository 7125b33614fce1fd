"""Pages: after any taking, sharing and releasing, every page is either free or used.

Shapes: P = pages of a row.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from yggdrasil.errors import CapacityError
from yggdrasil.serve.migration import migrate_, waves
from yggdrasil.serve.pages import PagePool, pages_for

TEXT = list(range(100, 180))  # five pages


def pool(num_pages: int = 8) -> PagePool:
    return PagePool(num_pages, num_rows=3, max_indices=128)


@pytest.fixture
def pages() -> PagePool:
    return pool()


def fill(pages: PagePool, row: int, tokens: list[int], *, draft_len: int = 0) -> None:
    """Take pages for a row and publish all of its tokens except the last."""
    target_len, _ = pages.share_(row, tokens)
    pages.extend_(row, len(tokens))
    pages.publish_(row, tokens, max(target_len, len(tokens) - 1), draft_len)
    pages.check()


@pytest.mark.parametrize(("indices", "pages"), ((0, 0), (1, 1), (16, 1), (17, 2)))
def test_a_page_holds_sixteen_indices(indices: int, pages: int) -> None:
    assert pages_for(indices) == pages


def test_a_row_s_table_lists_its_pages_in_order(pages: PagePool) -> None:
    pages.extend_(0, 20)
    pages.extend_(1, 16)
    pages.extend_(0, 33)
    assert pages.table_BP[0, :3].tolist() == [0, 1, 3]
    assert pages.table_BP[1, :1].tolist() == [2]
    assert (pages.num_free, pages.num_missing(0, 48), pages.num_missing(0, 49)) == (4, 0, 1)


def test_a_row_takes_no_page_if_too_few_are_free() -> None:
    pages = pool(2)
    with pytest.raises(CapacityError, match="3 needed, 2 free"):
        pages.extend_(0, 40)
    assert pages.num_free == 2
    pages.check()


def test_a_prompt_shares_the_full_pages_of_an_equal_beginning(pages: PagePool) -> None:
    fill(pages, 0, TEXT[:50], draft_len=20)
    assert pages.share_(1, [*TEXT[:40], 1, 2, 3]) == (32, 16)  # the draft had filled only the first page
    assert pages.table_BP[1, :2].tolist() == pages.table_BP[0, :2].tolist()
    pages.check()
    pages.release_(0)
    pages.check()
    assert pages.num_free == 6  # two are still in use
    # another beginning: the same text, but one token later
    assert pages.share_(2, [9, *TEXT]) == (0, 0)


def test_the_last_token_of_a_prompt_is_always_computed(pages: PagePool) -> None:
    fill(pages, 0, TEXT[:49])
    # 48 tokens are three full pages, but the logits of the last token are needed
    assert pages.share_(1, TEXT[:48]) == (32, 0)


def test_released_text_can_be_shared_until_its_page_is_taken() -> None:
    pages = pool(4)
    fill(pages, 0, TEXT[:49])
    pages.release_(0)
    assert pages.share_(1, TEXT[:49]) == (48, 0)
    pages.release_(1)
    pages.extend_(2, 64)  # takes all pages
    assert pages.share_(1, TEXT[:49]) == (0, 0)
    pages.check()


def test_the_end_of_a_released_text_is_taken_first() -> None:
    pages = pool(4)
    fill(pages, 0, TEXT[:49])
    pages.release_(0)
    pages.extend_(2, 16)
    assert pages.share_(1, TEXT[:49]) == (48, 0)  # the page taken was the fourth, which was not full
    pages.release_(1)
    pages.extend_(2, 32)
    assert pages.share_(1, TEXT[:49]) == (32, 0)


def test_pages_of_drafts_that_were_not_committed_are_taken_before_text() -> None:
    pool = PagePool(6, num_rows=2, max_indices=200)
    text = list(range(40))
    pool.extend_(0, 40)
    pool.publish_(0, text, 40, 40)
    pool.release_(0)
    for _ in range(6):  # more than all pages, one after another
        pool.extend_(1, 32)
        pool.trim_(1, 16)
        pool.check()
    assert pool.share_(0, text) == (32, 32)


def test_a_row_has_no_more_pages_than_its_table_holds() -> None:
    pages = pool(9)
    pages.extend_(1, 128)
    with pytest.raises(CapacityError):
        pages.extend_(1, 129)
    pages.check()
    assert pages.num_free == 1


def test_flushing_forgets_the_text_of_free_pages(pages: PagePool) -> None:
    fill(pages, 0, TEXT[:33])
    fill(pages, 1, TEXT[40:73])
    pages.release_(1)
    pages.flush_()
    assert pages.share_(1, TEXT[40:73]) == (0, 0)
    assert pages.share_(2, TEXT[:33]) == (32, 0)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("begin", "grow", "end")),
            st.integers(0, 2),
            st.integers(1, 70),
            st.sampled_from((0, 8, 16)),
        ),
        max_size=40,
    )
)
def test_any_sequence_of_actions_keeps_the_pool_consistent(
    actions: list[tuple[str, int, int, int]],
) -> None:
    pages = pool(9)
    texts = {}
    for action, row, count, start in actions:
        try:
            if action == "begin" and row not in texts:
                tokens = TEXT[start : start + count] or [1]
                shared, _ = pages.share_(row, tokens)
                assert shared <= len(tokens) - 1
                texts[row] = tokens
                pages.extend_(row, len(tokens))
                pages.publish_(row, tokens, len(tokens) - 1, min(count, len(tokens) - 1))
            elif action == "grow" and row in texts:
                texts[row] = [*texts[row], *range(count % 20)]
                pages.extend_(row, len(texts[row]))
                pages.publish_(row, texts[row], len(texts[row]) - 1, 0)
            elif action == "end":
                pages.release_(row)
                texts.pop(row, None)
        except CapacityError:
            pages.release_(row)
            texts.pop(row)
        pages.check()
    for row in range(3):
        pages.release_(row)
    assert pages.num_free == 9
    pages.check()


def test_waves_write_a_page_only_after_it_was_read() -> None:
    assert list(waves({7: 1, 8: 2}, spare=9)) == [{7: 1, 8: 2}]
    assert list(waves({1: 2, 2: 3}, spare=9)) == [{2: 3}, {1: 2}]
    assert list(waves({1: 2, 2: 1}, spare=9)) == [{1: 9}, {2: 1}, {9: 2}]
    assert list(waves({}, spare=9)) == []


@given(st.permutations(range(8)), st.permutations(range(8)), st.integers(0, 8))
def test_any_mapping_moves_every_page_once(old: list[int], new: list[int], count: int) -> None:
    moves = dict(zip(old[:count], new[:count], strict=True))
    storage = torch.arange(9.0)[:, None].repeat(1, 3)
    migrate_(storage, moves, spare=8)
    assert {to: int(storage[to, 0]) for to in moves.values()} == {
        to: origin for origin, to in moves.items()
    }
    untouched = {*range(8)} - {*moves.values()}
    assert all(int(storage[page, 0]) == page for page in untouched)


def test_expansion_appends_pages_and_contraction_renames_what_rows_own() -> None:
    pool = PagePool(4, num_rows=3, max_indices=200)
    pool.extend_(0, 16 * 3)
    pool.expand_(7)
    assert (pool.num_pages, pool.num_free) == (7, 4)
    pool.extend_(1, 16 * 3)  # pages 3, 4, 5
    pool.release_(0)
    pool.check()
    # the beginning of the text goes first; free pages in the order of the queue
    assert pool.contract_(4) == {4: 0, 5: 1}
    assert pool.table_BP[1, :3].tolist() == [3, 0, 1]
    assert (pool.num_pages, pool.num_free) == (4, 1)
    pool.check()
    with pytest.raises(CapacityError, match="2 needed, 1 free"):
        pool.extend_(2, 32)


def test_contraction_keeps_shared_prefixes_shared() -> None:
    tokens = list(range(50))
    pool = PagePool(4, num_rows=3, max_indices=200)
    pool.extend_(2, 64)
    pool.expand_(9)
    pool.extend_(0, 50)
    pool.publish_(0, tokens, 50, 0)
    assert pool.share_(1, tokens) == (48, 0)
    pool.release_(2)
    moves = pool.contract_(4)
    pool.check()
    assert sorted(moves) == [4, 5, 6, 7]
    for row in (0, 1):
        assert pool.table_BP[row, :3].tolist() == [moves[page] for page in (4, 5, 6)]
    pool.release_(1)
    assert pool.share_(1, tokens) == (48, 0)
    pool.check()


def test_contraction_overwrites_free_pages_without_a_text_first() -> None:
    tokens = list(range(40))
    pool = PagePool(4, num_rows=4, max_indices=200)
    pool.extend_(0, 32)
    pool.publish_(0, tokens, 32, 32)
    pool.extend_(1, 32)
    pool.expand_(6)
    pool.extend_(2, 16)
    pool.release_(0)
    pool.release_(1)
    assert pool.contract_(4) == {4: 2}  # not 1, which has been free for longer
    assert pool.share_(3, tokens) == (32, 32)
    pool.check()
