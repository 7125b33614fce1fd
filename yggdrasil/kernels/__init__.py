"""Our operators: a torch reference, a C++ body for the CPU and, for some, a Triton body for CUDA."""

from yggdrasil.kernels.build import (
    build_kernels,
    check_kernels,
    kernel_library,
    library_path,
    load_cuda_kernels,
    load_kernels,
)

__all__ = [
    "build_kernels",
    "check_kernels",
    "kernel_library",
    "library_path",
    "load_cuda_kernels",
    "load_kernels",
]
