"""Compile a forward at one shape with torch.export and AOTInductor, and load the package."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from torch import Tensor, nn

from yggdrasil.compiler.fusion import fuse_linears_
from yggdrasil.compiler.regions import compile_regions, read_regions, regions_of
from yggdrasil.compiler.rotary import evaluate_sines_once_, rotate_by_halves_
from yggdrasil.errors import ArtifactError
from yggdrasil.kernels.compilations import count_compilation
from yggdrasil.kernels.shims import c_shims
from yggdrasil.store import storage

__all__ = ["LoadedGraph", "ReplayedGraph", "compile_graph", "full_precision"]

INDUCTOR_OPTIONS = {
    # The package has no constants. The caller binds weights and KV: all graphs of the menu share one copy.
    "aot_inductor.package_constants_in_so": False,
    # Small constants are bound too, not inlined: at compile time their values may be uninitialised.
    "always_keep_tensor_constants": True,
    # Only profilers read line tables.
    "aot_inductor.enable_line_tables": False,
    # Inductor compiles no test program for the vector ISA: our operators are built with the same flags.
    "cpp.vec_isa_ok": True,
}


def full_precision() -> None:
    """Keep cuBLAS from rounding fp32 inputs to TF32 and from reducing in bf16.

    The settings apply when a graph is lowered, and again when it runs or is captured.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def _reduction_options() -> dict[str, bool]:
    """Options that give a reduction the same order of summation in every graph, on CUDA.

    Without them Inductor benchmarks several configurations of each reduction and takes the fastest one.
    Older versions have only one of the two options.
    """
    return {
        name: True for name in ("deterministic", "batch_invariant") if hasattr(torch._inductor.config, name)
    }


def compile_graph(
    module: nn.Module, meta_NM: Tensor, path: Path, *, exact: bool = True, by_region: bool = False
) -> None:
    """Export `module` at the shape of `meta_NM` and write an AOTInductor package without constants.

    Args:
        module: A TargetForward or DraftForward; values of weights are not read.
        meta_NM: Metadata of the right shape; its values are not read.
        path: The `.pt2` file to write.
        exact: On CUDA, Inductor's own kernels compute a row in the same way for any number of rows.
        by_region: Equal layers are compiled once, see compiler/regions.py. A call of a region takes
            microseconds, so this is for layers that take much longer.

    Raises:
        Any error of torch.export: a model that it cannot capture as one graph has no fallback.

    Cost: seconds of tracing and seconds of C++ compilation.
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
            rotate_by_halves_(exported.graph_module.graph)
        exported.graph_module.recompile()
        options = {
            **INDUCTOR_OPTIONS,
            **(_reduction_options() if exact and meta_NM.is_cuda else {}),
            # Only quantised weights have a graph of one row. There Inductor fuses an addition and the norm
            # after it, so every operation has to round its result, whatever it is fused with.
            "emulate_precision_casts": _is_quantised(module),
            # At O0 a forward takes up to 3 % longer, and that of a small draft a tenth.
            "aot_inductor.compile_wrapper_opt_level": "O1",
            # The wrapper calls our operators directly, not through the dispatcher.
            "aot_inductor.custom_ops_to_c_shims": c_shims(),
        }
        # A folder of its own: Inductor names sources by their content and writes them little by little, so
        # another process that builds the same graph could package half a file.
        with (
            tempfile.TemporaryDirectory(dir=path.parent) as sources,
            torch._inductor.config.patch({"aot_inductor.output_path": sources}),
        ):
            regions = regions_of(exported) if by_region else None
            if regions is not None:
                compile_regions(*regions, path, options)
            else:
                torch._inductor.aoti_compile_and_package(
                    exported, package_path=str(path), inductor_configs=options
                )


def _is_quantised(module: nn.Module) -> bool:
    return any(tensor.dtype == torch.int8 for tensor in module.state_dict().values())


def _separate_buffers_(module: nn.Module) -> None:
    """Give every buffer its own uninitialised storage, with the same strides.

    The compiler treats views of one storage as aliases and copies whole caches.
    """
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.untyped_storage().nbytes() != buffer.nbytes:
            own = torch.empty_strided(
                buffer.size(), buffer.stride(), dtype=buffer.dtype, device=buffer.device
            )
            setattr(module, name, own)


class LoadedGraph:
    """An AOTInductor package with the caller's weights and cache as its constants.

    Args:
        constants: Every weight and buffer by its name in the module. Aliasing: kept alive, never copied.
        is_streamed: Whether no cache keeps the weights until the next forward.
        command: The command that builds the package again, for the error.

    Attributes:
        graph_object: Of kernels/graph.cpp, for C++ steps that run it.

    Raises:
        ArtifactError: the package does not load, or needs a constant that is not in `constants`.
        StoreError: the folder for temporary files, where the package is unpacked, is full or not writable.
    """

    def __init__(self, path: Path, constants: dict[str, Tensor], is_streamed: bool, command: str) -> None:
        device_index = next(iter(constants.values())).device.index
        try:
            regions = read_regions(path)
            with storage.store_errors(Path(tempfile.gettempdir())), storage.scratch_for_graphs():
                self.graph_object: Any = torch.classes.ygg.Graph(
                    str(path),
                    -1 if device_index is None else device_index,
                    constants,
                    is_streamed,
                    *map(list, regions),
                )
        except (RuntimeError, OSError, ValueError, TypeError, BadZipFile) as error:
            raise ArtifactError(path, f"corrupt ({str(error).strip().splitlines()[0]})", command) from None

    def __call__(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        """Run the graph; every call returns new tensors."""
        first, second = self.graph_object.run(meta_NM)
        return first, second


class ReplayedGraph:
    """A loaded graph captured as a CUDA graph: a call is one launch.

    Args:
        meta_NM: The metadata buffer that every call reads.
        pool: Memory that all captures of a model share, from `torch.cuda.graph_pool_handle()`.

    Aliasing: the next call of any graph with this pool may overwrite the outputs.
    """

    def __init__(self, graph: LoadedGraph, meta_NM: Tensor, pool: Any) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        # warm-up: a capture must not record lazy initialisation
        with torch.cuda.stream(stream):
            for _ in range(3):
                graph(meta_NM)
        torch.cuda.current_stream().wait_stream(stream)
        self._captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._captured, pool=pool):
            self._outputs = graph(meta_NM)

    def __call__(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        self._captured.replay()
        return self._outputs
