"""Lower one forward at one shape with TorchInductor ahead of time, and load it again in milliseconds."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from yggdrasil.compiler.fusion import fuse_linears_
from yggdrasil.compiler.rotary import evaluate_sines_once_
from yggdrasil.errors import ArtifactError
from yggdrasil.kernels.compilations import count_compilation
from yggdrasil.kernels.shims import c_shims
from yggdrasil.store import storage

__all__ = ["LoadedGraph", "ReplayedGraph", "compile_graph", "full_precision"]

INDUCTOR_OPTIONS = {
    # weights and KV stay the caller's: one copy for the whole menu
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,  # small buffers too: the compiler may see uninitialised values
    "aot_inductor.enable_line_tables": False,
    "cpp.vec_isa_ok": True,  # our operators were built and loaded with the same flags: no trial builds
}


def full_precision() -> None:
    """Let cuBLAS neither round fp32 inputs to TF32 nor reduce in bf16. It is asked when a graph is lowered,
    and again when it runs or is captured.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def _reduction_options() -> dict[str, bool]:
    """On CUDA Inductor times ways to add up a row and takes the fastest, graph by graph; these modes, of
    which older versions have one, forbid it.
    """
    return {
        name: True for name in ("deterministic", "batch_invariant") if hasattr(torch._inductor.config, name)
    }


def compile_graph(
    module: nn.Module, meta_NM: Tensor, path: Path, *, exact: bool = True, is_small: bool = False
) -> None:
    """Export `module` at the shape of `meta_NM` as one graph and write it as an AOTInductor package without
    weights.

    Args:
        module: A TargetForward or DraftForward; weight values are not read.
        meta_NM: Metadata of the shape, values free.
        path: A `.pt2` file to write.
        exact: On CUDA, let a row's sums not depend on how many rows the graph has, as far as Inductor's own
            kernels go.
        is_small: Whether its kernels are so short that what an optimised wrapper saves counts: a tenth of a
            draft's forward.

    Raises:
        Whatever torch.export raises for a model that it cannot capture: there is no fallback.

    Cost: seconds of tracing, seconds of the C++ compiler.
    """
    count_compilation()
    full_precision()
    _separate_buffers_(module)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*tree_map_only.*")
        exported = torch.export.export(module, (meta_NM,), strict=False)
        fuse_linears_(exported.graph_module.graph)
        if not meta_NM.is_cuda:
            evaluate_sines_once_(exported.graph_module.graph)
        exported.graph_module.recompile()
        options = {
            **INDUCTOR_OPTIONS,
            **(_reduction_options() if exact and meta_NM.is_cuda else {}),
            "aot_inductor.compile_wrapper_opt_level": "O1" if is_small else "O0",
            "aot_inductor.custom_ops_to_c_shims": c_shims(),
        }
        torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=options)


def _separate_buffers_(module: nn.Module) -> None:
    """Give every buffer a storage of its own, with its strides: views of one storage look like aliases to
    the compiler, which then copies whole caches.
    """
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.untyped_storage().nbytes() != buffer.nbytes:
            setattr(
                module,
                name,
                torch.empty_strided(
                    buffer.size(), buffer.stride(), dtype=buffer.dtype, device=buffer.device
                ),
            )


class LoadedGraph:
    """A compiled shape bound to the caller's weights and cache.

    Args:
        constants: Every weight and buffer by its name in the module; kept alive here, never copied.
        command: What rebuilds the package, for the error.

    Attributes:
        native: The same as an object of kernels/graph.cpp, for loops that run it from there.

    Raises:
        ArtifactError: the package does not load, or asks for a constant that is not there.
        StoreError: the folder for temporary files, where it is unpacked, is full or closed.
    """

    def __init__(self, path: Path, constants: dict[str, Tensor], command: str) -> None:
        device_index = next(iter(constants.values())).device.index
        try:
            with storage.store_errors(Path(tempfile.gettempdir())), storage.scratch_for_graphs():
                self.native: Any = torch.classes.ygg.Graph(
                    str(path), -1 if device_index is None else device_index, constants
                )
        except RuntimeError as error:
            raise ArtifactError(path, f"corrupt ({str(error).strip().splitlines()[0]})", command) from None

    def __call__(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        """Run; new output tensors every call."""
        first, second = self.native.run(meta_NM)
        return first, second


class ReplayedGraph:
    """A loaded graph captured as a CUDA graph: a call is one launch.

    Args:
        meta_NM: The metadata buffer that every call fills.
        pool: Memory shared by all captures of a model, from `torch.cuda.graph_pool_handle()`.

    Aliasing: outputs are overwritten by the next call of any graph with this pool: what one graph returns,
    another may use in between."""

    def __init__(self, graph: LoadedGraph, meta_NM: Tensor, pool: Any) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # lazy initialisation must not be captured
            for _ in range(3):
                graph(meta_NM)
        torch.cuda.current_stream().wait_stream(stream)
        self._captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._captured, pool=pool):
            self._outputs = graph(meta_NM)

    def __call__(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        self._captured.replay()
        return self._outputs
