"""Products of tiles in Triton's interpreter as a device computes them: each row alone.

The interpreter multiplies with NumPy, and so with the host's BLAS. Some kernels of BLAS (OpenBLAS on
processors with AVX2 but without AVX-512) sum a row in an order that depends on its place in the tile;
tensor cores do not.

Shapes: R = rows of a tile. Here K = a block of k, C = columns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray
from triton.runtime import interpreter

Array = NDArray[np.floating]


class _RowByRow:
    """NumPy with another product of matrices."""

    def __getattr__(self, name: str) -> object:
        return getattr(np, name)

    def matmul(self, a_RK: Array, b_KC: Array, dtype: DTypeLike) -> Array:
        return np.einsum("rk,kc->rc", a_RK, b_KC, dtype=dtype)


def multiply_row_by_row() -> None:
    """Let the interpreter of this process compute products row by row."""
    interpreter.np = _RowByRow()
