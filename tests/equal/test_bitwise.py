"""The same token has the same bits in every graph of the menu, in a chain or in a tree.

Shapes: P = pages of a row.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_pair
import torch
from conftest import COMPRESSED, compiled
from plain_texts import assert_streamed_equal
from torch import Tensor

from yggdrasil.compiler.model import CompiledModel
from yggdrasil.models.packing import pack_chain_, pack_nodes_
from yggdrasil.pair import LoadedPair, load_pair
from yggdrasil.tree import TokenTree

PREFIX = list(range(30, 53))
TEXT = [60, 61, 62, 63]


@pytest.fixture(scope="module", params=("float32", "bfloat16"))
def pair(request: pytest.FixtureRequest, ygg_home: Path, tiny: LoadedPair) -> LoadedPair:
    """Llama in float32, and the Qwen3 pair of test_exact.py in bfloat16 with compressed weights."""
    if request.param == "float32":
        return tiny
    folder = ygg_home / "models" / "qwen3"
    folders = str(folder / "target"), str(folder / "draft")
    if not (folder / "draft" / "model.safetensors").exists():
        folders = tiny_pair.save_random_pair(folder, "qwen3")
    compiled(ygg_home, "qwen3", folders, COMPRESSED)
    return load_pair("qwen3")


def prefilled(model: CompiledModel, tokens: list[int]) -> None:
    """Commit `tokens` one at a time through the smallest graph: plain decoding."""
    model.cache.rollback_(0)
    for token in tokens:
        chain(model, [token], model.menu.sizes[0])
        model.cache.commit_([0])


def chain(model: CompiledModel, tokens: list[int], size: int) -> Tensor:
    """Logits of a chain after the committed tokens, through the graph of `size` tokens."""
    meta_NM = model.meta(size)
    pack_chain_(meta_NM, tokens, model.cache.len)
    return model.forward(meta_NM)[0]


def in_tree(model: CompiledModel, size: int, max_depth: int) -> Tensor:
    """Logits of TEXT as a path of a tree of `size` nodes, with siblings between the path's nodes."""
    tree = TokenTree.root(TEXT[0], size, max_depth=max_depth)
    nodes = [0]
    per_level = (size - 1) // (len(TEXT) - 1)
    for token in TEXT[1:]:
        first = len(tree)
        siblings = torch.tensor([*range(100, 100 + per_level - 1), token])
        tree.grow(torch.full((per_level,), nodes[-1]), siblings, torch.full((per_level,), -float(first)))
        nodes.append(len(tree) - 1)
    meta_NM = model.meta(size)
    pack_nodes_(meta_NM, tree, 0, len(tree), model.cache.len)
    return model.forward(meta_NM)[0][nodes]


def test_rows_are_bitwise_equal_across_the_menu(pair: LoadedPair) -> None:
    model = pair.engine.target
    assert model.menu.sizes in ((2, 4, 8, 16, 32), (2, 4, 16))
    prefilled(model, PREFIX)
    expected = []
    for step, token in enumerate(TEXT):  # plain decoding of TEXT
        expected.append(chain(model, [token], 2)[0].clone())
        model.cache.commit_([0])
        assert model.cache.len == len(PREFIX) + step + 1
    model.cache.rollback_(len(PREFIX))
    for size in model.menu.sizes:
        first = [chain(model, [TEXT[0]], size)[0]]
        assert torch.equal(first[0], expected[0]), f"first token through {size}"
        if size >= len(TEXT):
            for name, rows in (
                ("chain", chain(model, TEXT, size)[: len(TEXT)]),
                ("tree", in_tree(model, size, pair.bundle.config.path_depth)),
            ):
                assert torch.equal(rows, torch.stack(expected)), f"{name} through {size}"


@pytest.mark.parametrize("prefix_len", (1, 14, 31, 32, 33, 63, 77))
def test_rows_are_bitwise_equal_at_every_context(pair: LoadedPair, prefix_len: int) -> None:
    """Contexts around the ends of pages and key blocks, where a row's last keys move to the next block."""
    model = pair.engine.target
    prefix = [(7 * place) % 90 + 5 for place in range(prefix_len)]
    prefilled(model, prefix)
    expected = []
    for token in TEXT:
        expected.append(chain(model, [token], 2)[0].clone())
        model.cache.commit_([0])
    model.cache.rollback_(prefix_len)
    for size in model.menu.sizes:
        if size >= len(TEXT):
            for name, rows in (
                ("chain", chain(model, TEXT, size)[: len(TEXT)]),
                ("tree", in_tree(model, size, pair.bundle.config.path_depth)),
            ):
                assert torch.equal(rows, torch.stack(expected)), f"{name} through {size}"


def test_weights_that_no_cache_keeps_give_the_same_bits(
    pair: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_streamed_equal(pair, monkeypatch)


def test_rows_do_not_depend_on_where_the_pages_lie(pair: LoadedPair) -> None:
    model = pair.engine.target
    size = model.menu.sizes[-1]
    identity = model.cache.pages_BP.clone()
    prefilled(model, PREFIX)
    expected = in_tree(model, size, pair.bundle.config.path_depth).clone()
    try:
        model.cache.pages_BP.copy_(
            identity[:, torch.randperm(identity.shape[1], generator=torch.Generator().manual_seed(0))]
        )
        prefilled(model, PREFIX)
        assert torch.equal(in_tree(model, size, pair.bundle.config.path_depth), expected)
    finally:
        model.cache.pages_BP.copy_(identity)


def test_rows_do_not_depend_on_how_the_prefix_was_prefilled(pair: LoadedPair) -> None:
    model = pair.engine.target
    prefilled(model, PREFIX)
    expected = chain(model, TEXT, 4)[: len(TEXT)].clone()
    for size in model.menu.sizes[1:]:
        model.cache.rollback_(0)
        for start in range(0, len(PREFIX), size):
            chunk = PREFIX[start : start + size]
            chain(model, chunk, size)
            model.cache.commit_(range(len(chunk)))
        assert torch.equal(chain(model, TEXT, 4)[: len(TEXT)], expected), f"prefilled through {size}"


def test_draft_candidates_are_bitwise_equal_across_the_menu(pair: LoadedPair) -> None:
    """So the drafted tree does not depend on how the draft caught up."""
    model = pair.engine.draft
    prefilled(model, PREFIX)
    outputs = []
    for size in model.menu.sizes:
        meta_NM = model.meta(size)
        pack_chain_(meta_NM, [TEXT[0]], model.cache.len)
        outputs.append([out[0].clone() for out in model.forward(meta_NM)])
    for tokens_C, log_probs_C in outputs[1:]:
        assert torch.equal(tokens_C, outputs[0][0])
        assert torch.equal(log_probs_C, outputs[0][1])


def test_a_committed_path_has_the_bits_of_plain_decoding(pair: LoadedPair) -> None:
    model = pair.engine.target
    prefilled(model, [*PREFIX, *TEXT])
    expected = chain(model, [77], 2)[0].clone()
    model.cache.rollback_(len(PREFIX))
    size = model.menu.sizes[-1]
    in_tree(model, size, pair.bundle.config.path_depth)
    per_level = (size - 1) // (len(TEXT) - 1)
    model.cache.commit_([0, *(per_level * level for level in range(1, len(TEXT)))])
    assert torch.equal(chain(model, [77], 2)[0], expected)
