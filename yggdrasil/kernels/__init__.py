"""Our few operators; each has a torch reference, a C++ body for the CPU and, where it pays, a Triton body for CUDA, side by side."""

from yggdrasil.kernels.build import is_built, kernel_library, load_cuda_kernels, load_kernels

__all__ = ["is_built", "kernel_library", "load_cuda_kernels", "load_kernels"]
