"""The Triton body of linear layers agrees with its reference; a row has the same bits in all widths."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from yggdrasil.models.load import order_linears_

SCRIPT = """
import torch
from triton_products import multiply_row_by_row
from yggdrasil.kernels import linear_triton

multiply_row_by_row()
torch.manual_seed(0)

def inputs(num_rows, out_features, in_features, dtype, has_bias):
    weight = torch.randn(out_features, in_features, dtype=dtype) / in_features**0.5
    x = torch.randn(num_rows, in_features, dtype=dtype)
    return x, weight, torch.randn(out_features, dtype=dtype) if has_bias else None

shapes = (
    (1, 32, 128, False), (2, 40, 96, True), (17, 70, 300, True), (5, 33, 1030, False), (16, 1, 1, True),
)

for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
    for num_rows, out_features, in_features, has_bias in shapes:
        x, weight, bias = inputs(num_rows, out_features, in_features, dtype, has_bias)
        expected = linear_triton.reference(x, weight, bias)
        got = linear_triton.launch(x, weight, bias)
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    x, weight, bias = inputs(12, 48, 256, dtype, True)
    strided = x.view(1, 3, 4, 256).transpose(1, 2)
    got = linear_triton.launch(strided, weight, bias)
    assert got.shape == (1, 4, 3, 48)
    assert torch.equal(got, linear_triton.launch(x, weight, bias).view(1, 3, 4, 48).transpose(1, 2))

# every row has the bits of the row alone
for dtype in (torch.float32, torch.bfloat16):
    x, weight, bias = inputs(64, 72, 650, dtype, True)
    assert linear_triton.num_splits(72, 650) > 1
    alone = torch.cat([linear_triton.launch(row[None], weight, bias) for row in x])
    for width in (1, 2, 3, 4, 7, 8, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64):
        assert torch.equal(linear_triton.launch(x[:width], weight, bias), alone[:width]), width
        assert torch.equal(linear_triton.launch(x[64 - width :], weight, bias), alone[64 - width :]), width

# rows that are read keep their bits when other tiles are skipped
from yggdrasil.layout import READ
from yggdrasil.models.packing import empty_meta

x, weight, bias = inputs(40, 48, 256, torch.float32, True)
whole = linear_triton.launch(x, weight, bias)
meta_NM = empty_meta(40, 3)
for read in ([3, 20], [39], list(range(16, 32)), []):
    meta_NM[:, READ] = 0
    meta_NM[read, READ] = 1
    assert torch.equal(linear_triton.launch(x, weight, bias, meta_NM)[read], whole[read]), read
print("equal")
"""

FOR_A_DEVICE = """
import re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from yggdrasil.kernels import linear_triton

blocks = {"ROWS": 16, "BLOCK_OUT": linear_triton.BLOCK_OUT, "BLOCK_K": linear_triton.BLOCK_K}
tiles = {**blocks, "WIDEN": False, "HAS_META": True, "READ_COLUMN": 5}
sizes = ("num_rows", "out_features", "in_features", "blocks_per_split", "meta_width")
pointers = {"x": "*bf16", "weight": "*bf16", "meta": "*i32", "partial": "*fp32"}
signature = {**pointers, **dict.fromkeys(sizes, "i32"), **dict.fromkeys(tiles, "constexpr")}
source = ASTSource(fn=linear_triton.multiply_kernel, signature=signature, constexprs=tiles)
ptx = compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
print(*sorted(set(re.findall("w?g?mma[^ ]+m[0-9]+n[0-9]+k[0-9]+", ptx))))
"""


def test_the_product_compiles_for_a_device_to_tensor_cores_of_sixteen_rows() -> None:
    """Sixteen rows and k in order make a row's bits independent. The compiler needs no device."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FOR_A_DEVICE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "mma.sync.aligned.m16n8k16", done.stderr[-3000:]


def test_the_kernels_equal_the_reference_and_rows_do_not_depend_on_their_number() -> None:
    # in its own process, because Triton decides at import whether it interprets
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "equal", done.stderr[-3000:]


def test_replaced_layers_keep_their_parameters_names_and_ties() -> None:
    """So all kernels read the weights that the checkpoint stores."""
    model = nn.ModuleDict(
        {"embed": nn.Embedding(24, 16), "up": nn.Linear(16, 32), "head": nn.Linear(16, 24, bias=False)}
    )
    model["head"].weight = model["embed"].weight
    before = dict(model.named_parameters(remove_duplicate=False))
    order_linears_(model)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == ["embed.weight", "up.weight", "up.bias", "head.weight"]
    assert all(after[name] is before[name] for name in before)
    assert [type(model[name]).__name__ for name in model] == ["Embedding", "OrderedLinear", "OrderedLinear"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize(("out_features", "in_features"), ((4096, 4096), (768, 3072), (4097, 70)))
def test_rows_do_not_depend_on_their_number_on_a_device(
    dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    from yggdrasil.kernels import linear_triton

    weight = torch.randn(out_features, in_features, dtype=dtype, device="cuda") / in_features**0.5
    x = torch.randn(64, in_features, dtype=dtype, device="cuda")
    together = linear_triton.launch(x, weight, None)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(
        together, linear_triton.reference(x, weight, None), atol=tolerance, rtol=tolerance
    )
    for width in range(1, 65):
        assert torch.equal(linear_triton.launch(x[:width], weight, None), together[:width]), width
        assert torch.equal(linear_triton.launch(x[64 - width :], weight, None), together[64 - width :]), (
            width
        )
