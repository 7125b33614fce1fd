"""The Triton body of tree attention, in Triton's interpreter, against the torch reference."""

import os
import subprocess
import sys

import pytest
import torch

SCRIPT = """
import sys, torch
from yggdrasil.kernels import attention, attention_triton
from yggdrasil.layout import PATH
from yggdrasil.models.packing import Piece, empty_meta, pack_chains_plain_, pack_nodes_plain_
from yggdrasil.tree import TokenTree

torch.manual_seed(0)
tree = TokenTree.root(1, 8, max_depth=5)
tree.grow(torch.tensor([0, 0]), torch.tensor([2, 3]), torch.tensor([-0.1, -0.2]))
tree.grow(torch.tensor([1, 2]), torch.tensor([2, 3]), torch.tensor([-0.3, -0.4]))
pages = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32)

def inputs(heads, kv_heads, dim, dtype):
    shapes = [(1, heads, 8, dim), (1, kv_heads, 8, dim), (1, kv_heads, 8, dim), (kv_heads, 64, dim), (kv_heads, 64, dim)]
    return [torch.randn(shape).to(dtype) for shape in shapes]

for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
    for heads, kv_heads, dim in ((4, 2, 32), (3, 1, 80), (2, 2, 64)):
        for packed in ("tree", "chain"):
            meta = empty_meta(8, 5)
            pack_nodes_plain_(meta, tree, 0, 5, 21) if packed == "tree" else pack_chains_plain_(meta, [Piece(0, range(7), 19)])
            query, key, value, key_cache, value_cache = inputs(heads, kv_heads, dim, dtype)
            copies = key_cache.clone(), value_cache.clone()
            strided = query.transpose(1, 2).contiguous().transpose(1, 2)
            got = attention_triton.launch(strided, key, value, key_cache, value_cache, meta, pages, dim**-0.5)
            want = attention.reference(query, key, value, *copies, meta, pages, dim**-0.5)
            assert torch.equal(key_cache, copies[0]) and torch.equal(value_cache, copies[1])
            torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)

# plain == tree, bit for bit: node 3 (path 0, 1, 3) as a tree node, and as the last token of a chain with the same keys
query, key, value, key_cache, value_cache = inputs(4, 2, 32, torch.float32)
meta = empty_meta(8, 5)
pack_nodes_plain_(meta, tree, 0, 5, 21)
in_tree = attention_triton.launch(query, key, value, key_cache.clone(), value_cache.clone(), meta, pages, 0.2)[0, 3]
chain = [0, 1, 3]
meta = empty_meta(3, 5)
pack_chains_plain_(meta, [Piece(0, [0, 0, 0], 21)])
alone = attention_triton.launch(query[:, :, chain], key[:, :, chain], value[:, :, chain], key_cache.clone(), value_cache.clone(), meta, pages, 0.2)[0, 2]
assert torch.equal(in_tree, alone)
print("equal")
"""


def test_the_kernels_equal_the_reference_and_a_tree_node_equals_plain_decoding() -> None:
    # A process of its own: Triton decides at import whether it interprets.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "equal", done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_equal_the_reference_on_a_device() -> None:
    from yggdrasil.kernels import attention, attention_triton
    from yggdrasil.models.packing import Piece, empty_meta, pack_chains_plain_

    meta = empty_meta(8, 5)
    pack_chains_plain_(meta, [Piece(0, range(7), 19)])
    shapes = [(1, 4, 8, 64), (1, 2, 8, 64), (1, 2, 8, 64), (2, 64, 64), (2, 64, 64)]
    tensors = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    pages = torch.arange(4, dtype=torch.int32)[None]
    on_device = [tensor.cuda() for tensor in tensors]
    got = attention_triton.launch(*on_device, meta.cuda(), pages.cuda(), 0.125)
    torch.testing.assert_close(got.cpu(), attention.reference(*tensors, meta, pages, 0.125), atol=2e-2, rtol=2e-2)
