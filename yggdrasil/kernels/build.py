"""Compile our C++ operators once with the compiler that Inductor uses, and load them."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

from yggdrasil.errors import ArtifactError
from yggdrasil.kernels import attention, candidates, linear
from yggdrasil.kernels.compilations import count_compilation
from yggdrasil.store import artifacts, storage
from yggdrasil.store.digests import Ledger
from yggdrasil.store.trust import check_trusted

__all__ = [
    "build_kernels",
    "check_kernels",
    "kernel_library",
    "library_path",
    "load_cuda_kernels",
    "load_kernels",
]

LIBRARY_NAME = "ygg_kernels"
LIBRARY_FILE = f"{LIBRARY_NAME}.so"
INCLUDE_MOST = ("operators", "runtime")  # of the sources


def _sources() -> list[Path]:
    return sorted(Path(__file__).parent.glob("*.cpp"))


def library_path() -> Path:
    """Path of the library for these sources, this torch and this processor in the compile cache."""
    headers = Path(__file__).parent.glob("*.h")
    # with this file, which has the compiler's options
    sources = [path.read_text() for path in sorted([*_sources(), *headers, Path(__file__)])]
    return (
        artifacts.compile_cache()
        / artifacts.OPERATORS
        / artifacts.digest(sources, torch.__version__, artifacts.cpu_flags())
        / LIBRARY_FILE
    )


def _compile(folder: Path) -> None:
    """Compile every source by itself, one per core at a time, and link them."""
    # imported only for a build: it takes 0.5 s
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    # the instruction sets of this processor, without the trial builds of each set, which take 10 s
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        isa = pick_vec_isa()

    def build(name: str, sources: list[str], *, compile_only: bool) -> str:
        # Inductor vectorises its own code and turns off the compiler's loop vectoriser; our code needs it
        options = CppTorchOptions(
            vec_isa=isa,
            include_pytorch=True,
            compile_only=compile_only,
            extra_flags=["-ftree-loop-vectorize", "-g0"],
        )
        builder = CppBuilder(name=name, sources=sources, BuildOption=options, output_dir=str(folder))
        builder.build()
        return str(builder.get_target_file_path())

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        objects = list(
            threads.map(
                lambda path: build(path.stem, [str(path)], compile_only=True), _longest_first(_sources())
            )
        )
    build(LIBRARY_NAME, objects, compile_only=False)
    for path in objects:
        os.remove(path)


def _longest_first(sources: list[Path]) -> list[Path]:
    """In the order of their compile times: those that include most, then by length."""
    return sorted(sources, key=lambda path: (path.stem not in INCLUDE_MOST, -path.stat().st_size))


def build_kernels() -> None:
    """Compile the library, unless a whole one exists or this process has it loaded.

    Raises:
        RuntimeError: the C++ compiler failed; its output is in the message.

    Cost: reads the library, or compiles it in 20 s to more than a minute.
    """
    folder = library_path().parent
    if not _is_loaded() and LIBRARY_FILE not in Ledger(folder).whole([LIBRARY_FILE]):
        if folder.exists():
            storage.remove(folder)
        with artifacts.atomic_directory(folder) as temporary:
            count_compilation()
            _compile(temporary)
            Ledger(temporary).record(LIBRARY_FILE)


def load_kernels(command: str = "ygg compile") -> None:
    """Make `torch.ops.ygg` available; compile the library first if this machine has none.

    Models on CUDA need it too: the same operators fill in the metadata of text on the host.

    Args:
        command: The command that rebuilds the library, for the error.

    Raises:
        ArtifactError: the library is damaged, or others can write it.
        RuntimeError: the C++ compiler failed; its output is in the message.

    Cost: that of `build_kernels` if it compiles.
    """
    if not _is_loaded():
        path = library_path()
        if not path.parent.exists():
            build_kernels()
        check_trusted([path], f"YGG_HOME=FOLDER {command}")
        check_kernels(command)
    kernel_library()


def check_kernels(command: str, *, full: bool = False) -> None:
    """Raise ArtifactError if the library has changed since it was written.

    With `full`, read it even if its size and time are unchanged.
    """
    ledger = Ledger(library_path().parent)
    digests = ledger.digests([LIBRARY_FILE])
    if not digests:
        raise ArtifactError(ledger.path, "missing or corrupt (it has no digest of the operators)", command)
    ledger.check(digests, command, full=full)


def _is_loaded() -> bool:
    return kernel_library.cache_info().currsize > 0


@cache
def kernel_library() -> ctypes.CDLL:
    """The library of `load_kernels`, for its C entry points."""
    # global symbols, because compiled graphs call the C entry points by name
    library = ctypes.CDLL(str(library_path()), mode=ctypes.RTLD_GLOBAL)
    library.ygg_num_threads.restype = ctypes.c_int64
    library.ygg_set_num_threads.argtypes = (ctypes.c_int64,)
    library.ygg_num_threads()  # fixes the number before torch runs on one thread for a while
    for operator in (attention, candidates, linear):
        operator.register()
    return library


@cache
def load_cuda_kernels() -> None:
    """Define the operators of graphs for CUDA, and the commit after them.

    Cost: imports Triton.
    """
    from yggdrasil.kernels import attention_triton, commit_triton, linear_triton

    for operator in (attention_triton, commit_triton, linear_triton):
        operator.register()
