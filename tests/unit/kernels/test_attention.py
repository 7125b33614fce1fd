"""`ygg::attend` agrees with its reference, and a token's bits depend only on its own history.

Shapes: H = query heads, G = KV heads, T = tokens of the history, F = features of a head, P = pages,
L = layers, S = slots of a page.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from yggdrasil.kernels.attention import reference
from yggdrasil.kernels.threads import get_num_threads, set_num_threads
from yggdrasil.layout import INDEX, PAGE_LEN, PATH, PREFIX, READ
from yggdrasil.models.packing import empty_meta, pack_chain_, pack_nodes_
from yggdrasil.page_order import by_slot, in_pages
from yggdrasil.tree import TokenTree

pytestmark = pytest.mark.usefixtures("kernels")

DTYPES = (torch.bfloat16, torch.float32)
TOLERANCE = {torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}, torch.float32: {"rtol": 1e-4, "atol": 1e-4}}
SLOTS = 160
MAX_DEPTH = 6


class Attention:
    """One layer's caches and the fresh queries, keys and values of N tokens."""

    def __init__(
        self,
        num_tokens: int,
        dtype: torch.dtype,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 32,
        fill: float | None = None,
    ) -> None:
        self.query = torch.randn(1, heads, num_tokens, dim).to(dtype)
        self.key, self.value = (torch.randn(1, kv_heads, num_tokens, dim).to(dtype) for _ in range(2))
        shape = (SLOTS // PAGE_LEN, 3, 2, kv_heads, PAGE_LEN, dim)  # the middle one of three layers
        # slot after slot
        self.storage_PL2GSF = (torch.randn(shape) if fill is None else torch.full(shape, fill)).to(dtype)
        self.key_cache = self.storage_PL2GSF[:, 1, 0]
        self.value_cache = self.storage_PL2GSF[:, 1, 1]
        self.pages = torch.randperm(SLOTS // PAGE_LEN).to(torch.int32)[None]
        self.scale = dim**-0.5

    def run(self, meta_NM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output and both caches after it, slot after slot, of the operator."""
        storage_PL2GSF = in_pages(self.storage_PL2GSF)
        caches = storage_PL2GSF[:, 1].unbind(1)
        out = torch.ops.ygg.attend(
            self.query, self.key, self.value, *caches, meta_NM, self.pages, self.scale
        )
        return out, *by_slot(storage_PL2GSF)[:, 1].unbind(1)

    def run_reference(self, meta_NM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        caches = self.key_cache.clone(), self.value_cache.clone()
        return reference(
            self.query, self.key, self.value, *caches, meta_NM, self.pages, self.scale
        ), *caches


def random_tree(num_nodes: int) -> TokenTree:
    """Nodes attached at random, no deeper than the metadata's paths."""
    tree = TokenTree.root(0, num_nodes, max_depth=MAX_DEPTH)
    for node in range(1, num_nodes):
        shallow = torch.nonzero(tree.depth_N < MAX_DEPTH)[:, 0]
        parent = shallow[torch.randint(len(shallow), (1,))]
        tree.grow(parent, torch.tensor([node]), tree.log_prob_N[parent] - 0.1)
    return tree


def meta_of(layout: str, num_tokens: int) -> Tensor:
    """Metadata of N tokens, the last two of them padding, after 37 committed ones."""
    meta_NM = empty_meta(num_tokens, MAX_DEPTH)
    if layout == "chain":
        pack_chain_(meta_NM, list(range(num_tokens - 2)), 37)
    else:
        pack_nodes_(meta_NM, random_tree(num_tokens - 2), 0, num_tokens - 2, 37)
    return meta_NM


def assert_agrees(attention: Attention, meta_NM: Tensor) -> None:
    out, *caches = attention.run(meta_NM)
    expected, *expected_caches = attention.run_reference(meta_NM)
    assert out.dtype == attention.query.dtype
    torch.testing.assert_close(out, expected, **TOLERANCE[out.dtype])
    for cache, expected_cache in zip(caches, expected_caches, strict=True):
        assert torch.equal(cache, expected_cache)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ("chain", "tree"))
@pytest.mark.parametrize("num_tokens", (3, 8, 21))
@pytest.mark.parametrize(("heads", "kv_heads"), ((4, 4), (4, 2), (6, 1)))
def test_agrees_with_the_reference(
    heads: int, kv_heads: int, num_tokens: int, layout: str, dtype: torch.dtype
) -> None:
    assert_agrees(Attention(num_tokens, dtype, heads=heads, kv_heads=kv_heads), meta_of(layout, num_tokens))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", (16, 32, 64, 80, 128))
def test_agrees_with_the_reference_for_every_head_dimension(dim: int, dtype: torch.dtype) -> None:
    assert_agrees(Attention(7, dtype, dim=dim), meta_of("tree", 7))


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_the_reference_on_transposed_inputs(dtype: torch.dtype) -> None:
    attention = Attention(9, dtype)
    for name in ("query", "key", "value"):  # (1, N, heads, F) in memory, as models make it
        tensor = getattr(attention, name)
        setattr(attention, name, tensor.transpose(1, 2).contiguous().transpose(1, 2))
    assert_agrees(attention, meta_of("tree", 9))


def test_a_token_that_sees_one_key_returns_its_value() -> None:
    attention = Attention(2, torch.float32, heads=2, kv_heads=1, dim=16)
    meta_NM = empty_meta(2, MAX_DEPTH)
    pack_chain_(meta_NM, [5], 0)
    out, key_cache, _ = attention.run(meta_NM)
    torch.testing.assert_close(out[0, 0], attention.value[0, :, 0].expand(2, 16))
    assert torch.equal(key_cache[attention.pages[0, 0], :, 0], attention.key[0, :, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_returns_zeros_and_stores_nothing(dtype: torch.dtype) -> None:
    attention = Attention(6, dtype)
    out, key_cache, value_cache = attention.run(empty_meta(6, MAX_DEPTH))
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(key_cache, attention.key_cache)
    assert torch.equal(value_cache, attention.value_cache)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ("chain", "tree"))
def test_nan_in_slots_that_no_token_reads_never_leaks(layout: str, dtype: torch.dtype) -> None:
    num_tokens = 12
    meta_NM = meta_of(layout, 12)
    clean = Attention(num_tokens, dtype)
    poisoned = Attention(num_tokens, dtype, fill=float("nan"))
    for name in ("query", "key", "value", "pages"):
        setattr(poisoned, name, getattr(clean, name))
    for index in range(37):  # what was committed is alike in both; every other slot is NaN in one
        slot = int(clean.pages[0, index // PAGE_LEN]), slice(None), index % PAGE_LEN
        poisoned.key_cache[slot] = clean.key_cache[slot]
        poisoned.value_cache[slot] = clean.value_cache[slot]
    expected = clean.run(meta_NM)[0]
    out = poisoned.run(meta_NM)[0]
    assert out.isfinite().all()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_one_token_reaches_only_tokens_that_see_it(dtype: torch.dtype) -> None:
    tree = TokenTree.root(0, 4, max_depth=MAX_DEPTH)
    tree.grow(torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([-0.1, -0.2]))
    tree.grow(torch.tensor([1]), torch.tensor([3]), torch.tensor([-0.3]))
    meta_NM = empty_meta(4, MAX_DEPTH)
    pack_nodes_(meta_NM, tree, 0, 4, 20)
    attention = Attention(4, dtype)
    attention.value[0, :, 1] = float("nan")
    finite = attention.run(meta_NM)[0][0].isfinite().flatten(1).all(dim=1)
    assert finite.tolist() == [True, False, True, False]


class History:
    """A text of 60 tokens in one layer, replayed as any mixture of committed prefix, tree nodes, neighbours
    and pages.
    """

    def __init__(self, dtype: torch.dtype, *, heads: int = 4, kv_heads: int = 2, dim: int = 80) -> None:
        self.dtype = dtype
        self.heads = heads
        self.kv_heads = kv_heads
        self.dim = dim
        self.length = 60
        self.query_HTF = torch.randn(heads, self.length, dim).to(dtype)
        self.key_GTF, self.value_GTF = (torch.randn(kv_heads, self.length, dim).to(dtype) for _ in range(2))

    def last_row(self, *, num_tree: int, siblings: int, width: int, pages: Tensor) -> Tensor:
        """The output of the last token when the last `num_tree` tokens are tree nodes, each with random
        siblings, in a call of `width` tokens.
        """
        root_pos = self.length - num_tree
        tree = TokenTree.root(0, 1 + (num_tree - 1) * (1 + siblings), max_depth=MAX_DEPTH)
        token_of = {0: root_pos}
        last = 0
        for step in range(1, num_tree):
            first = len(tree)
            parents = torch.full((1 + siblings,), last)
            tree.grow(parents, torch.arange(1 + siblings), torch.full((1 + siblings,), -float(step)))
            last = first + siblings  # the text goes on in the last of the siblings
            token_of[last] = root_pos + step
        return self._run(tree, token_of, root_pos, width, pages)[last]

    def _run(
        self, tree: TokenTree, token_of: dict[int, int], root_pos: int, width: int, pages: Tensor
    ) -> Tensor:
        meta_NM = empty_meta(width, MAX_DEPTH)
        pack_nodes_(meta_NM, tree, 0, len(tree), root_pos)
        attention = Attention(width, self.dtype, heads=self.heads, kv_heads=self.kv_heads, dim=self.dim)
        attention.pages = pages
        for node, token in token_of.items():
            attention.query[0, :, node] = self.query_HTF[:, token]
            attention.key[0, :, node] = self.key_GTF[:, token]
            attention.value[0, :, node] = self.value_GTF[:, token]
        self.commit(attention, root_pos)
        return attention.run(meta_NM)[0][0]

    def commit(self, attention: Attention, count: int) -> None:
        for index in range(count):
            slot = int(attention.pages[0, index // PAGE_LEN]), slice(None), index % PAGE_LEN
            attention.key_cache[slot] = self.key_GTF[:, index]
            attention.value_cache[slot] = self.value_GTF[:, index]

    def plain_row(self, *, first: int, pages: Tensor) -> Tensor:
        """The output of the last token as the end of a chain that starts at `first`: plain decoding where
        it is the last.
        """
        meta_NM = empty_meta(max(2, self.length - first), MAX_DEPTH)
        pack_chain_(meta_NM, [0] * (self.length - first), first)
        attention = Attention(
            len(meta_NM), self.dtype, heads=self.heads, kv_heads=self.kv_heads, dim=self.dim
        )
        attention.pages = pages
        for n, token in enumerate(range(first, self.length)):
            attention.query[0, :, n] = self.query_HTF[:, token]
            attention.key[0, :, n] = self.key_GTF[:, token]
            attention.value[0, :, n] = self.value_GTF[:, token]
        self.commit(attention, first)
        return attention.run(meta_NM)[0][0, self.length - first - 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", (16, 80))
def test_row_bits_do_not_depend_on_width_slots_or_neighbours(dim: int, dtype: torch.dtype) -> None:
    history = History(dtype, dim=dim)
    identity = torch.arange(SLOTS // PAGE_LEN, dtype=torch.int32)[None]
    expected = history.plain_row(first=59, pages=identity)
    for pages in (identity, torch.randperm(SLOTS // PAGE_LEN).to(torch.int32)[None]):
        for first in (59, 52, 40, 27):  # prompt chunks of 1, 8, 20 and 33 tokens
            assert torch.equal(history.plain_row(first=first, pages=pages), expected), f"chunk from {first}"
        for num_tree in (1, 2, 5, 7):
            for siblings, width in ((0, 8), (0, 19), (1, 13), (3, 32), (3, 64)):
                row = history.last_row(num_tree=num_tree, siblings=siblings, width=width, pages=pages)
                assert torch.equal(row, expected), (
                    f"{num_tree} tree nodes with {siblings} siblings in {width} tokens"
                )


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_thread_count(dtype: torch.dtype) -> None:
    attention = Attention(21, dtype)
    meta_NM = meta_of("tree", 21)
    num_threads = get_num_threads()
    try:
        set_num_threads(1)
        one = attention.run(meta_NM)[0]
        set_num_threads(3)
        three = attention.run(meta_NM)[0]
    finally:
        set_num_threads(num_threads)
    assert torch.equal(one, three)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_other_requests_in_one_call_change_nothing(dtype: torch.dtype) -> None:
    attention = Attention(6, dtype)
    attention.pages = torch.randperm(SLOTS // PAGE_LEN).to(torch.int32).view(2, -1)
    both_NM = empty_meta(6, MAX_DEPTH)
    alone_NM = empty_meta(6, MAX_DEPTH)
    pack_nodes_(alone_NM, random_tree(3), 0, 3, 18, row=1)
    both_NM[:3] = alone_NM[:3]
    pack_chain_(both_NM[3:], [1, 2, 3], 30, row=0)
    assert torch.equal(attention.run(both_NM)[0][0, :3], attention.run(alone_NM)[0][0, :3])
    assert_agrees(attention, both_NM)


def test_a_head_dimension_that_is_not_a_multiple_of_16_is_refused() -> None:
    with pytest.raises(RuntimeError, match="head dimension 24 is not a multiple of 16"):
        Attention(2, torch.float32, dim=24).run(empty_meta(2, MAX_DEPTH))
    with pytest.raises(RuntimeError, match="neither float32 nor bfloat16"):
        Attention(2, torch.float16).run(empty_meta(2, MAX_DEPTH))


def test_packed_metadata_equals_a_table_written_by_hand() -> None:
    meta_NM = empty_meta(4, 2)
    tree = TokenTree.root(7, 3, max_depth=2)
    tree.grow(torch.tensor([0]), torch.tensor([8]), torch.tensor([-1.0]))
    tree.grow(torch.tensor([1]), torch.tensor([9]), torch.tensor([-2.0]))
    pack_nodes_(meta_NM, tree, 1, 3, 10)
    padding = [0, 0, 0, -1, 0, 0, -1, -1, -1]
    assert meta_NM.tolist() == [
        [8, 11, 0, 11, 10, 1, 0, 1, -1],
        [9, 12, 0, 12, 10, 1, 0, 1, 2],
        padding,
        padding,
    ]
    pack_chain_(meta_NM, [4, 5, 6], 20, num_read=1)
    assert meta_NM[:, READ].tolist() == [0, 0, 1, 0]
    assert meta_NM[:, INDEX].tolist() == [20, 21, 22, -1]
    assert meta_NM[:, PREFIX].tolist() == [21, 22, 23, 0]
    assert (meta_NM[:, PATH:] == -1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_attend_passes_opcheck(dtype: torch.dtype) -> None:
    attention = Attention(4, dtype)
    inputs = (
        attention.query,
        attention.key,
        attention.value,
        attention.key_cache,
        attention.value_cache,
        meta_of("tree", 4),
        attention.pages,
        attention.scale,
    )
    torch.library.opcheck(torch.ops.ygg.attend.default, inputs)
