"""The claims of the Triton kernels, as functions of a device.

The device is "cpu" under Triton's interpreter, or "cuda" for compiled kernels. Triton decides at import
whether it interprets, so test_triton_kernels.py runs this file in its own process with TRITON_INTERPRET=1.
It prints one JSON document: for every claim null, or the traceback that refutes it.

Shapes: H = query heads, G = KV heads, T = tokens of the history, F = features of a head, P = pages.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton_products import multiply_row_by_row

from yggdrasil.kernels import attention, attention_triton, commit_triton, migrate, migrate_triton
from yggdrasil.kernels.attention_triton import CONFIGS, Config
from yggdrasil.layout import PAGE_LEN
from yggdrasil.models.packing import Chunk, empty_meta, pack_chains_reference_, pack_nodes_reference_
from yggdrasil.tree import TokenTree

Claim = Callable[[str], None]
CLAIMS: dict[str, Claim] = {}
# several splits in a context that is short enough for an interpreter
SMALL = Config(lanes=16, block=16, split=32, num_warps=1, num_stages=1)
MAX_DEPTH = 5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def claim(function: Claim) -> Claim:
    CLAIMS[function.__name__] = function
    return function


# Attention


@dataclass(kw_only=True)
class Call:
    """One layer's caches, inside the storage of two layers, and the fresh queries, keys and values of N
    tokens.
    """

    meta_NM: Tensor
    pages_BP: Tensor
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    dtype: torch.dtype = torch.float32
    config: Config | None = SMALL
    query: Tensor = field(init=False)
    key: Tensor = field(init=False)
    value: Tensor = field(init=False)
    storage: Tensor = field(init=False)

    def __post_init__(self) -> None:
        num_tokens = len(self.meta_NM)
        num_pages = 1 + int(self.pages_BP.max())
        self.query = torch.randn(1, self.heads, num_tokens, self.dim).to(self.dtype)
        self.key, self.value = (
            torch.randn(1, self.kv_heads, num_tokens, self.dim).to(self.dtype) for _ in range(2)
        )
        self.storage = torch.randn(num_pages, 2, 2, self.kv_heads, PAGE_LEN, self.dim).to(self.dtype)

    def arguments(self, device: str) -> tuple[list[Tensor], Tensor]:
        """What the kernels take, and the storage that they write."""
        storage = self.storage.to(device, copy=True)
        inputs = [each.to(device) for each in (self.query, self.key, self.value)]
        return [
            *inputs,
            storage[:, 1, 0],
            storage[:, 1, 1],
            self.meta_NM.to(device),
            self.pages_BP.to(device),
        ], storage

    def run(self, device: str, **options: Any) -> tuple[Tensor, Tensor]:
        """(N, H, F) and the storage after it, on the host."""
        arguments, storage = self.arguments(device)
        return attention_triton.launch(*arguments, self.dim**-0.5, config=self.config, **options)[
            0
        ].cpu(), storage.cpu()

    def run_reference(self) -> tuple[Tensor, Tensor]:
        arguments, storage = self.arguments("cpu")
        return attention.reference(*arguments, self.dim**-0.5)[0], storage

    def assert_agrees(self, device: str, **options: Any) -> None:
        (got, got_storage) = self.run(device, **options)
        (want, want_storage) = self.run_reference()
        assert torch.equal(got_storage, want_storage), (
            "fresh keys and values are stored where they belong and nothing else changes"
        )
        torch.testing.assert_close(got, want, atol=TOLERANCE[self.dtype], rtol=TOLERANCE[self.dtype])


def tree_of(path_len: int, siblings: int) -> tuple[TokenTree, list[int]]:
    """A tree with `siblings` leaves next to each node of a path, and the path, root first."""
    tree = TokenTree.root(0, 1 + (path_len - 1) * (1 + siblings), max_depth=MAX_DEPTH)
    path = [0]
    for step in range(1, path_len):
        first = len(tree)
        tree.grow(
            torch.full((1 + siblings,), path[-1]),
            torch.arange(1 + siblings),
            torch.full((1 + siblings,), -float(step)),
        )
        path.append(first + siblings)
    return tree, path


def tree_meta(context: int, width: int, *, path_len: int = 4, siblings: int = 1, row: int = 0) -> Tensor:
    meta_NM = empty_meta(width, MAX_DEPTH)
    (tree, _) = tree_of(path_len, siblings)
    pack_nodes_reference_(meta_NM, tree, 0, len(tree), context, row=row)
    return meta_NM


def chain_meta(width: int, *chunks: Chunk) -> Tensor:
    meta_NM = empty_meta(width, MAX_DEPTH)
    pack_chains_reference_(meta_NM, chunks)
    return meta_NM


def tables(rows: int, pages: int) -> Tensor:
    """Every row's pages, scattered over all of the storage."""
    return torch.randperm(rows * pages).to(torch.int32).view(rows, pages)


METAS: Mapping[str, tuple[Tensor, int]] = {
    "tree": (tree_meta(83, 6, path_len=3), 1),
    "prompt chunk": (chain_meta(10, Chunk(0, range(10), 70)), 1),
    "plain": (chain_meta(1, Chunk(0, [0], 95)), 1),
    "first tokens": (chain_meta(4, Chunk(0, range(3), 0)), 1),
    "batch": (
        chain_meta(8, Chunk(1, range(2), 85), Chunk(0, range(3), 0), Chunk(3, [0], 40), Chunk(2, [0], 30)),
        4,
    ),
}


@claim
def attention_agrees_with_the_reference_in_every_layout_and_dtype(device: str) -> None:
    for dtype, names in ((torch.float32, METAS), (torch.bfloat16, ("tree", "plain"))):
        for meta_NM, rows in (METAS[name] for name in names):
            Call(meta_NM=meta_NM, pages_BP=tables(rows, 7), dtype=dtype).assert_agrees(device)


class Package:
    """Wraps kernels as a package does: grid and constants are those of the first launch, the trace, for
    good.
    """

    def __init__(self) -> None:
        self.traced: dict[str, tuple[Any, dict[str, Any]]] = {}

    def __call__(self, kernel: Any) -> Any:
        return Packaged(kernel, self.traced)


@dataclass
class Packaged:
    """A kernel in a package."""

    kernel: Any
    traced: dict[str, tuple[Any, dict[str, Any]]]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*arguments: Any, **constants: Any) -> None:
            traced_grid, traced_constants = self.traced.setdefault(self.kernel.__name__, (grid, constants))
            self.kernel[traced_grid](*arguments, **traced_constants)

        return run


@claim
def a_launch_traced_with_one_row_of_pages_is_right_for_many(device: str) -> None:
    meta_NM, rows = METAS["batch"]
    # a window of tokens in a program, and heads that exceed the lanes
    for heads, kv_heads in ((4, 2), (20, 1)):
        package = Package()
        shape = {"heads": heads, "kv_heads": kv_heads}
        Call(meta_NM=empty_meta(len(meta_NM), MAX_DEPTH), pages_BP=tables(1, 7), **shape).run(
            device, wrap=package
        )
        Call(meta_NM=meta_NM, pages_BP=tables(rows, 7), **shape).assert_agrees(device, wrap=package)


@claim
def attention_agrees_with_the_reference_for_every_head_dimension_and_ratio(device: str) -> None:
    # 20 heads exceed the lanes
    shapes = ((2, 2, 16), (6, 1, 32), (3, 1, 80), (2, 2, 128), (7, 1, 96), (20, 1, 64))
    for index, (heads, kv_heads, dim) in enumerate(shapes):
        meta_NM, rows = METAS["batch" if heads == 3 else "tree"]
        shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "dtype": list(TOLERANCE)[index % 2]}
        Call(meta_NM=meta_NM, pages_BP=tables(rows, 7), **shape).assert_agrees(device)


@claim
def attention_agrees_with_the_reference_with_every_entry_of_the_menu(device: str) -> None:
    for dtype, dim in CONFIGS:
        meta_NM = tree_meta(300, 6, path_len=3)
        Call(
            meta_NM=meta_NM, pages_BP=tables(1, 20), heads=2, kv_heads=1, dim=dim, dtype=dtype, config=None
        ).assert_agrees(device)


@claim
def attention_agrees_with_the_reference_on_transposed_inputs(device: str) -> None:
    call = Call(meta_NM=METAS["tree"][0], pages_BP=tables(1, 7))
    # queries, keys and values side by side, as one linear layer yields them
    fused = torch.randn(1, len(call.meta_NM), 8, call.dim)
    call.query, call.key, call.value = (part.transpose(1, 2) for part in fused.split((4, 2, 2), dim=2))
    arguments, storage = call.arguments(device)
    query, key, value = (part.transpose(1, 2) for part in fused.to(device).split((4, 2, 2), dim=2))
    got = attention_triton.launch(query, key, value, *arguments[3:], call.dim**-0.5, config=SMALL)[0].cpu()
    want, want_storage = call.run_reference()
    assert torch.equal(storage.cpu(), want_storage)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@claim
def padding_returns_zeros_and_stores_nothing(device: str) -> None:
    for rows in (1, 3):
        call = Call(meta_NM=empty_meta(5, MAX_DEPTH), pages_BP=tables(rows, 2))
        out, storage = call.run(device)
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(storage, call.storage)


@claim
def nan_in_slots_that_nobody_reads_never_leaks(device: str) -> None:
    for name, length in (("tree", 83), ("prompt chunk", 70)):
        clean = Call(meta_NM=METAS[name][0], pages_BP=tables(1, 8))
        poisoned = Call(meta_NM=clean.meta_NM, pages_BP=clean.pages_BP)
        poisoned.query = clean.query
        poisoned.key = clean.key
        poisoned.value = clean.value
        poisoned.storage = torch.full_like(clean.storage, float("nan"))
        page, slot = places(clean.pages_BP[0], length)
        poisoned.storage[page, :, :, :, slot] = clean.storage[page, :, :, :, slot]
        got = poisoned.run(device)[0]
        want = clean.run(device)[0]
        assert got.isfinite().all()
        assert torch.equal(got, want)


@claim
def nan_in_one_token_stays_with_those_who_see_it(device: str) -> None:
    tree = Call(meta_NM=tree_meta(40, 5, path_len=3, siblings=1), pages_BP=tables(1, 4))
    tree.value[0, :, 2] = float("nan")  # nodes 3 and 4 are its children, node 1 is its sibling
    assert finite_tokens(tree, device) == [True, True, False, False, False]
    chain = Call(
        meta_NM=chain_meta(26, Chunk(0, range(26), 14)), pages_BP=tables(1, 3), heads=2, kv_heads=2
    )
    # token 16 shares a program with tokens 23 to 25, whose body holds this key
    chain.key[0, :, 17] = float("nan")
    assert finite_tokens(chain, device) == [n < 17 for n in range(26)]


def finite_tokens(call: Call, device: str) -> list[bool]:
    return call.run(device)[0].isfinite().flatten(1).all(dim=1).tolist()


def places(pages_P: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Page and place in it of a row's first indices."""
    index = torch.arange(length)
    return pages_P[index // PAGE_LEN].long(), index % PAGE_LEN


class Text:
    """Queries, keys and values of a text in one layer, replayed as any mixture of committed prefix, fresh
    tokens, neighbours, rows and pages.
    """

    def __init__(
        self,
        device: str,
        length: int,
        config: Config | None,
        *,
        dtype: torch.dtype,
        heads: int,
        kv_heads: int,
        dim: int,
    ) -> None:
        self.device = device
        self.length = length
        self.config = config
        self.shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "dtype": dtype}
        self.query_HTF = torch.randn(heads, length, dim).to(dtype)
        self.key_GTF, self.value_GTF = (torch.randn(kv_heads, length, dim).to(dtype) for _ in range(2))

    def last_token(
        self, meta_NM: Tensor, token_of: Mapping[int, int], pages_BP: Tensor, *, row: int = 0
    ) -> Tensor:
        """Output of the text's last token in a call where token n is the text's `token_of[n]`; what comes
        before them is committed, all else is random.
        """
        call = Call(meta_NM=meta_NM, pages_BP=pages_BP, config=self.config, **self.shape)
        for n, token in token_of.items():
            call.query[0, :, n] = self.query_HTF[:, token]
            call.key[0, :, n] = self.key_GTF[:, token]
            call.value[0, :, n] = self.value_GTF[:, token]
        committed = min(token_of.values())
        page, slot = places(pages_BP[row], committed)
        call.storage[page, 1, 0, :, slot] = self.key_GTF[:, :committed].transpose(0, 1)
        call.storage[page, 1, 1, :, slot] = self.value_GTF[:, :committed].transpose(0, 1)
        [last] = [n for n, token in token_of.items() if token == self.length - 1]
        return call.run(self.device)[0][last]

    def plain(self, pages_BP: Tensor) -> Tensor:
        return self.chain(1, 1, pages_BP)

    def chain(self, count: int, width: int, pages_BP: Tensor) -> Tensor:
        """The last `count` tokens as a prompt chunk in a call of `width`."""
        first = self.length - count
        return self.last_token(
            chain_meta(width, Chunk(0, [0] * count, first)), {n: first + n for n in range(count)}, pages_BP
        )

    def tree(self, path_len: int, siblings: int, width: int, pages_BP: Tensor) -> Tensor:
        """The last `path_len` tokens as a path through a tree."""
        root_pos = self.length - path_len
        meta_NM = tree_meta(root_pos, width, path_len=path_len, siblings=siblings)
        path = tree_of(path_len, siblings)[1]
        return self.last_token(meta_NM, {node: root_pos + step for step, node in enumerate(path)}, pages_BP)

    def batch(
        self, count: int, before: Sequence[Chunk], after: Sequence[Chunk], pages_BP: Tensor, *, row: int
    ) -> Tensor:
        """The last `count` tokens as one row among others, without other tokens after its prefix."""
        first = self.length - count
        start = sum(len(chunk.tokens) for chunk in before)
        chunks = [*before, Chunk(row, [0] * count, first), *after]
        meta_NM = chain_meta(3 + sum(len(chunk.tokens) for chunk in chunks), *chunks)
        return self.last_token(meta_NM, {start + n: first + n for n in range(count)}, pages_BP, row=row)


def texts(device: str) -> list[Text]:
    """Small ones with a small configuration everywhere; on a device also the sizes of real models, with the
    menu's.
    """
    small: list[dict[str, object]] = [
        {"dtype": torch.float32, "heads": 2, "kv_heads": 1, "dim": 32},
        {"dtype": torch.bfloat16, "heads": 3, "kv_heads": 1, "dim": 80},
    ]
    # the last whole block of the prefix is in the tail
    found = [Text(device, 100, SMALL, **shape) for shape in small]
    if device == "cuda":
        for heads, kv_heads, dim in ((32, 32, 128), (32, 8, 128), (14, 2, 64), (32, 32, 80)):
            found += [
                Text(device, 1500, None, dtype=dtype, heads=heads, kv_heads=kv_heads, dim=dim)
                for dtype in TOLERANCE
            ]
    return found


def num_pages(text: Text) -> int:
    return 2 + text.length // PAGE_LEN


@claim
def a_tree_node_has_the_bits_of_plain_decoding_in_every_width(device: str) -> None:
    for text in texts(device):
        expected = text.plain(torch.arange(num_pages(text), dtype=torch.int32)[None])
        for path_len, siblings, width in (
            (1, 0, 1),
            (1, 0, 8),
            (2, 3, 5),
            (4, 1, 17),
            (6, 0, 6),
            (6, 2, 64),
        ):
            row = text.tree(path_len, siblings, width, tables(1, num_pages(text)))
            assert torch.equal(row, expected), (
                f"{text.shape}: path of {path_len} with {siblings} siblings in {width} tokens"
            )


@claim
def a_token_of_a_prompt_chunk_has_the_bits_of_plain_decoding(device: str) -> None:
    for text in texts(device):
        expected = text.plain(tables(1, num_pages(text)))
        for count, width in ((1, 2), (7, 8), (21, 64)):
            assert torch.equal(text.chain(count, width, tables(1, num_pages(text))), expected), (
                f"{text.shape}: the last of {count} in {width} tokens"
            )


@claim
def a_row_of_a_batch_has_the_bits_of_plain_decoding(device: str) -> None:
    for text in texts(device):
        expected = text.plain(tables(1, num_pages(text)))
        for count, before, after in (
            (1, [], []),
            (4, [Chunk(0, range(3), 50)], [Chunk(2, [0], 7)]),
            (1, [Chunk(2, range(6), 0), Chunk(0, [1], 85)], []),
        ):
            row = text.batch(count, before, after, tables(3, num_pages(text)), row=1)
            case = f"{text.shape}: {count} tokens after {len(before)} other rows"
            assert torch.equal(row, expected), case


@claim
def bits_do_not_depend_on_how_long_a_row_may_become(device: str) -> None:
    text = texts(device)[0]
    expected = text.plain(tables(1, num_pages(text)))
    for more in (1, 9, 40):
        assert torch.equal(text.plain(tables(1, num_pages(text) + more)), expected), (
            f"{more} pages more in the table"
        )


@claim
def shapes_that_the_kernels_would_read_wrong_are_refused(device: str) -> None:
    arguments, _ = Call(meta_NM=METAS["tree"][0], pages_BP=tables(1, 7)).arguments(device)
    query, key, value, key_cache, value_cache, meta, pages = arguments
    assert_refused("query heads a multiple of KV heads", query[:, :3], *arguments[1:])
    assert_refused("F contiguous", query.transpose(2, 3), *arguments[1:])
    assert_refused(
        "a page contiguous", query, key, value, key_cache.transpose(1, 2), value_cache, meta, pages
    )
    assert_refused(
        "have the same stride", query, key, value, key_cache.contiguous(), value_cache, meta, pages
    )
    assert_refused("no kernel for head dimension 32 in torch.float16", query.half(), *arguments[1:])


def assert_refused(message: str, *arguments: Tensor) -> None:
    try:
        attention_triton.launch(*arguments, 1.0)
    except ValueError as error:
        assert message in str(error), f"{message!r} is not in {error}"
    else:
        raise AssertionError(f"accepted what should be refused with {message!r}")


# Migration


@claim
def moved_pages_equal_the_reference(device: str) -> None:
    # pages of whole tiles, parts of one, and odd numbers of bytes
    shapes = ((9, 3, 2, 2, 16, 8), (6, 5), (5, 4099), (4, 2 * migrate_triton.TILE))
    for index, shape in enumerate(shapes):
        for dtype in (torch.bfloat16, torch.float32, torch.int8):
            storage = torch.randint(-100, 100, shape).to(dtype)
            number = torch.int32 if index % 2 else torch.int64
            moves = torch.randperm(shape[0])[: shape[0] // 2 * 2].view(2, -1).to(number)
            want = storage.clone()
            got = storage.to(device, copy=True)
            migrate.move_pages_reference_(want, moves[0], moves[1])
            migrate_triton.launch_(got, *moves.to(device))
            assert torch.equal(got.cpu(), want), f"{shape} of {dtype}"


@claim
def pages_are_moved_inside_a_part_of_a_buffer(device: str) -> None:
    buffer = torch.arange(1 + 6 * 10, dtype=torch.bfloat16).to(device)
    storage = buffer[1:].view(6, 10)  # begins in the middle of a wider word
    want = storage.cpu()
    migrate.move_pages_reference_(want, torch.tensor([5]), torch.tensor([0]))
    migrate_triton.launch_(storage, torch.tensor([5]).to(device), torch.tensor([0]).to(device))
    assert torch.equal(storage.cpu(), want)
    assert buffer[0] == 0


# Commit


def commit_by_hand(storage: Tensor, sources: Sequence[int], target: int) -> Tensor:
    """A copy of the storage in which slot `target + i` is the storage's slot `sources[i]`."""
    moved = storage.clone()
    for i, source in enumerate(sources):
        moved[(target + i) // PAGE_LEN, :, :, :, (target + i) % PAGE_LEN] = storage[
            source // PAGE_LEN, :, :, :, source % PAGE_LEN
        ]
    return moved


@claim
def commit_moves_the_accepted_path_of_every_layer_and_head(device: str) -> None:
    # the last ones take several tiles
    paths = ([], [9], [9, 10, 14], [8, 12, 40], list(range(20, 60, 2)), list(range(9, 42)))
    for index, sources in enumerate(paths):
        dtype, dim = ((torch.float32, 8), (torch.bfloat16, 80))[index % 2]
        storage = torch.randn(4, 2, 2, 3, PAGE_LEN, dim).to(dtype)
        got = storage.to(device, copy=True)
        commit_triton.launch_(got, torch.tensor([*sources, -1, -1], dtype=torch.int32).to(device), 8)
        assert torch.equal(got.cpu(), commit_by_hand(storage, sources, 8)), f"{sources} in {dtype}"


def main() -> None:
    """Judge every claim in the interpreter."""
    multiply_row_by_row()
    refuted = {}
    for name, function in CLAIMS.items():
        torch.manual_seed(0)
        try:
            function("cpu")
        except Exception:  # any of them refutes the claim
            refuted[name] = traceback.format_exc()
    print(json.dumps({name: refuted.get(name) for name in CLAIMS}))


if __name__ == "__main__":
    main()
