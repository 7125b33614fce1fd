"""The claims of triton_claims.py hold in Triton's interpreter, and compiled on a device if there is one.

What the compilers see is tested without a device.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton_claims
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget

from yggdrasil.kernels import attention_triton, commit_triton, migrate_triton
from yggdrasil.layout import PAGE_LEN
from yggdrasil.models.packing import empty_meta

HOPPER = GPUTarget("cuda", 90, 32)
MIN_SHARED_BYTES = 99 * 1024  # shared memory of a program on every device since Ampere
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}


@pytest.fixture(scope="module")
def refuted() -> dict[str, str | None]:
    """The interpreter's result for every claim, from its own process."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, triton_claims.__file__],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("name", triton_claims.CLAIMS)
def test_a_claim_holds_in_the_interpreter(name: str, refuted: dict[str, str | None]) -> None:
    assert refuted[name] is None, refuted[name]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", triton_claims.CLAIMS)
def test_a_claim_holds_on_a_device(name: str) -> None:
    triton_claims.CLAIMS[name]("cuda")


class AbsentDevice:
    """Tells Triton for which device to lower where there is none."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER


@pytest.fixture
def target() -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return
    triton.runtime.driver.set_active(AbsentDevice())
    yield
    triton.runtime.driver.set_active(None)  # found anew when it is asked for


class Layer(nn.Module):
    """Attention of one layer whose caches are views of page-major storage."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("key_cache", "value_cache"):
            self.register_buffer(
                name,
                torch.empty_strided(
                    (8, 2, PAGE_LEN, 64),
                    (6 * 2 * PAGE_LEN * 64, PAGE_LEN * 64, 64, 1),
                    dtype=torch.bfloat16,
                ),
            )
        self.register_buffer("pages", torch.zeros(1, 8, dtype=torch.int32))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, meta: Tensor) -> Tensor:
        out: Tensor = torch.ops.ygg.attend_cuda(
            query, key, value, self.key_cache, self.value_cache, meta, self.pages, 0.125
        )
        return out


@pytest.fixture(scope="module")
def attend_cuda() -> None:
    """The operator, unless a test before has defined it."""
    if not hasattr(torch.ops.ygg, "attend_cuda"):
        attention_triton.register()


def layer_inputs() -> tuple[Tensor, ...]:
    query = torch.randn(1, 4, 8, 64).bfloat16()
    (key, value) = torch.randn(2, 1, 2, 8, 64).bfloat16()
    return query, key, value, empty_meta(8, 4)


@pytest.mark.filterwarnings("ignore")
def test_the_compiler_sees_that_only_the_caches_of_the_caller_are_written(
    target: None, attend_cuda: None
) -> None:
    with torch.no_grad():
        exported = torch.export.export(Layer(), layer_inputs(), strict=False).run_decompositions(
            {}, decompose_custom_triton_ops=True
        )
    assert re.findall(r"tensors_to_clone = \[(.*?)\]", exported.graph_module.code) == [
        "'key_cache', 'value_cache'",
        "'sums', 'peaks', 'totals'",
        "'out'",
    ]
    assert (
        re.findall(r"'page_stride': (\d+)", exported.graph_module.code) == [str(6 * 2 * PAGE_LEN * 64)] * 3
    )
    assert sorted(exported.graph_signature.buffers_to_mutate.values()) == ["key_cache", "value_cache"]


class Recorder:
    """Stands for a kernel, and keeps what it is launched with."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **constants: self.launches.append((self.kernel, arguments, constants))


def compiled(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """A kernel for a device that need not be here, specialised as Triton does it: on numbers that are 1 or
    multiples of 16.
    """
    options = {name: constants[name] for name in ("num_warps", "num_stages") if name in constants}
    values = {
        (kernel.arg_names.index(name),): value for name, value in constants.items() if name not in options
    }
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    attributes = {}
    for index, (name, argument) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        if isinstance(argument, int) and argument == 1:
            values[(index,)] = 1
            continue
        signature[name] = (
            POINTERS[argument.dtype]
            if isinstance(argument, Tensor)
            else "fp32"
            if isinstance(argument, float)
            else "i32"
        )
        if isinstance(argument, Tensor) or (isinstance(argument, int) and argument % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return triton.compile(
        triton.compiler.ASTSource(kernel, signature, constexprs=values, attrs=attributes),
        target=HOPPER,
        options=options,
    )


def attention_launches(num_tokens: int, dim: int) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """What a call with the menu's configuration launches."""
    query = torch.empty(1, 8, num_tokens, dim, dtype=torch.bfloat16)
    key = torch.empty(1, 2, num_tokens, dim, dtype=torch.bfloat16)
    cache = torch.empty(64, 2, PAGE_LEN, dim, dtype=torch.bfloat16)
    pages = torch.zeros(2, 32, dtype=torch.int32)
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    attention_triton.launch(
        query,
        key,
        key,
        cache,
        cache,
        empty_meta(num_tokens, 16),
        pages,
        0.1,
        wrap=lambda kernel: Recorder(kernel, launches),
    )
    return launches


@pytest.mark.filterwarnings("ignore")
def test_the_attention_kernels_compile_without_a_device() -> None:
    launches = attention_launches(16, 80)
    assert [kernel.__name__ for kernel, _, _ in launches] == ["store_kernel", "body_kernel", "tail_kernel"]
    for launch in launches:
        assert compiled(*launch).metadata.shared <= MIN_SHARED_BYTES


@pytest.mark.filterwarnings("ignore")
def test_compiled_arithmetic_does_not_depend_on_the_number_of_tokens() -> None:
    for one, many in zip(attention_launches(1, 128)[1:], attention_launches(16, 128)[1:], strict=True):
        assert arithmetic(compiled(*one)) == arithmetic(compiled(*many)) != []


def arithmetic(kernel: Any) -> list[str]:
    """Instructions on floating-point numbers, in order."""
    return re.findall(
        r"^\s*(?:@%p\d+ )?((?:mma|ex2|fma|add|sub|mul|div|max|cvt)[\w.]*(?:f32|bf16)[\w.]*)",
        kernel.asm["ptx"],
        re.MULTILINE,
    )


@pytest.mark.filterwarnings("ignore")
def test_migration_and_commit_compile_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    for module, name in ((migrate_triton, "move_pages_kernel"), (commit_triton, "move_slots_kernel")):
        monkeypatch.setattr(module, name, Recorder(getattr(module, name), launches))
    storage = torch.empty(4, 2, 2, 2, PAGE_LEN, 80, dtype=torch.bfloat16)
    numbers = torch.zeros(2, dtype=torch.int32)
    migrate_triton.launch_(storage, numbers, numbers)
    commit_triton.launch_(storage, numbers, 3)
    for launch in launches:
        assert compiled(*launch).metadata.shared <= MIN_SHARED_BYTES


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")
def test_a_packaged_graph_runs_the_kernels(attend_cuda: None, tmp_path: Any) -> None:
    layer = Layer().cuda()
    inputs = tuple(each.cuda() for each in layer_inputs())
    triton_claims.pack_chains_reference_(inputs[3], [triton_claims.Chunk(0, range(6), 0)])
    with torch.no_grad():
        path = torch._inductor.aoti_compile_and_package(
            torch.export.export(layer, inputs, strict=False), package_path=str(tmp_path / "layer.pt2")
        )
        got = torch._inductor.aoti_load_package(path)(*inputs)
    want = attention_triton.launch(
        *inputs[:3], layer.key_cache, layer.value_cache, inputs[3], layer.pages, 0.125
    )
    assert torch.equal(got, want)
