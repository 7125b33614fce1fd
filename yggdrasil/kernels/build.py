"""Compile our C++ operators once with the compiler that Inductor uses, and load them."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

from yggdrasil import artifacts
from yggdrasil.compilations import count_compilation
from yggdrasil.kernels import attention, candidates, linear

__all__ = ["is_built", "kernel_library", "load_cuda_kernels", "load_kernels"]

LIBRARY_NAME = "ygg_kernels"


def _sources() -> list[Path]:
    return sorted(Path(__file__).parent.glob("*.cpp"))


def _folder() -> Path:
    headers = Path(__file__).parent.glob("*.h")
    sources = [path.read_text() for path in sorted([*_sources(), *headers, Path(__file__)])]  # this file has the compiler's options
    return artifacts.compile_cache() / artifacts.OPERATORS / artifacts.digest(sources, torch.__version__, artifacts.cpu_flags())


def is_built() -> bool:
    """Whether the shared library for these sources, this torch and this processor is in the compile cache."""
    return (_folder() / f"{LIBRARY_NAME}.so").exists()


def _compile(folder: Path) -> None:
    """Every source by itself, as many at a time as there are cores, then one library of them."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions  # 0.5 s to import: only when there is something to build
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):  # what this processor has; the trial builds of every set take 10 s, and ours follows anyway
        isa = pick_vec_isa()

    def build(name: str, sources: list[str], *, compile_only: bool) -> str:
        # Inductor vectorises its own code and switches the compiler's loop vectoriser off; ours relies on it.
        options = CppTorchOptions(vec_isa=isa, include_pytorch=True, compile_only=compile_only, extra_flags=["-ftree-loop-vectorize", "-g0"])
        builder = CppBuilder(name=name, sources=sources, BuildOption=options, output_dir=str(folder))
        builder.build()
        return str(builder.get_target_file_path())

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        objects = list(threads.map(lambda path: build(path.stem, [str(path)], compile_only=True), _longest_first(_sources())))
    build(LIBRARY_NAME, objects, compile_only=False)
    for path in objects:
        os.remove(path)


def _longest_first(sources: list[Path]) -> list[Path]:
    """By the time they take: what includes most of torch, then the longest."""
    return sorted(sources, key=lambda path: (path.stem != "operators", -path.stat().st_size))


def load_kernels() -> None:
    """Make `torch.ops.ygg` available, compiling the library first if this machine has not yet.

    With models on CUDA, too: metadata of text is filled in on the host, by the same operators.

    Raises:
        RuntimeError: the C++ compiler failed; its output is in the message.

    Cost: about 20 s where it compiles.
    """
    kernel_library()


@cache
def kernel_library() -> ctypes.CDLL:
    """The library of `load_kernels`, for its C entry points."""
    folder = _folder()
    if not is_built():
        with artifacts.atomic_directory(folder) as temporary:
            count_compilation()
            _compile(temporary)
    # Its symbols are global, for compiled graphs call the operators' C entry points by name.
    library = ctypes.CDLL(str(folder / f"{LIBRARY_NAME}.so"), mode=ctypes.RTLD_GLOBAL)
    library.ygg_num_threads.restype = ctypes.c_int64
    library.ygg_set_num_threads.argtypes = (ctypes.c_int64,)
    library.ygg_num_threads()  # settles it, before torch runs on one thread for a while
    for operator in (attention, candidates, linear):
        operator.register()
    return library


@cache
def load_cuda_kernels() -> None:
    """Define the operators that graphs for CUDA are built from, and the commit that follows them.

    Cost: imports Triton.
    """
    from yggdrasil.kernels import attention_triton, commit_triton, linear_triton

    for operator in (attention_triton, commit_triton, linear_triton):
        operator.register()
