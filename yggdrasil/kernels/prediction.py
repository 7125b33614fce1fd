"""How deep the next tree should be, in C++: the depth predictor and Eq. 3 in one call.

After a pass over the target's weights the caches hold nothing else, and a dozen small operators take longer
than a forward of a small draft. policy/depth.py and `Arms.best` of policy/shape.py are the specification.

Shapes: here H = outputs of the encoder, M = arms of the menu.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from yggdrasil.kernels.build import kernel_library
from yggdrasil.state import HostHidden

__all__ = ["ArmsStruct", "DepthCall"]

MATRICES = ["first", "first_bias", "second", "second_bias", "heads", "heads_bias", "share", "rest"]


class _PredictorStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in (*MATRICES, "of_root")),
        *((name, ctypes.c_int64) for name in ("inputs", "hidden", "depths", "vocab")),
    ]


class ArmsStruct(ctypes.Structure):
    """Arms for `DepthCall.best_arm`; keeps its arrays alive.

    Args:
        depth_M: (M,) D of every arm; 0 for plain decoding.
        gain_M: (M,) accepted tokens on the calibration text.
        cost_M: (M,) milliseconds.
        rate: Tokens per millisecond of the whole run.
    """

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("depth", "gain", "cost")),
        ("len", ctypes.c_int64),
        ("rate", ctypes.c_double),
    ]

    def __init__(
        self,
        depth_M: npt.NDArray[np.int64],
        gain_M: npt.NDArray[np.float64],
        cost_M: npt.NDArray[np.float64],
        rate: float,
    ) -> None:
        self.arrays = [
            np.ascontiguousarray(depth_M, dtype=np.int64),
            np.ascontiguousarray(gain_M, dtype=np.float64),
            np.ascontiguousarray(cost_M, dtype=np.float64),
        ]
        super().__init__(*(array.ctypes.data for array in self.arrays), len(depth_M), rate)


class DepthCall:
    """A depth predictor at one temperature, for one position at a time.

    Args:
        matrices: The fields of `Predictor` in kernels/prediction.h, float32: of three layers the weights,
            (inputs, outputs), and biases; share and rest, (D,).
        of_root_VH: What every token as the root adds to the first layer, float16.

    Attributes:
        growth_D: (D,) the growth that the last call has predicted. Aliasing: overwritten by the next call.
    """

    def __init__(
        self, matrices: Mapping[str, npt.NDArray[np.float32]], of_root_VH: npt.NDArray[np.float16]
    ) -> None:
        self._arrays: list[npt.NDArray[Any]] = [
            *(np.ascontiguousarray(matrices[name], dtype=np.float32) for name in MATRICES),
            np.ascontiguousarray(of_root_VH, dtype=np.float16),
        ]
        sizes = (*matrices["first"].shape, len(matrices["share"]), len(of_root_VH))
        self._struct = _PredictorStruct(*(array.ctypes.data for array in self._arrays), *sizes)
        self._at = ctypes.addressof(self._struct)
        self.growth_D = np.zeros(len(matrices["share"]), dtype=np.float32)
        self._growth_at = self.growth_D.ctypes.data
        self._call = _best_arm()

    def best_arm(self, arms: ArmsStruct, hidden_of: Callable[[], Tensor], root: int) -> int:
        """Index of the arm that Eq. 3 prefers with the growth that is predicted here.

        Args:
            hidden_of: `DecodeState.hidden_of`: the target's last hidden state, (E,).
            root: The last token of the text.

        Cost: reads the first layer's weights from memory. On CUDA one sync for the hidden state.
        """
        if isinstance(hidden_of, HostHidden):
            address = hidden_of.address
            item_bytes = hidden_of.item_bytes
        else:
            hidden_E = hidden_of().float().cpu().contiguous()  # sync: the host chooses the shape
            address = hidden_E.data_ptr()
            item_bytes = 4
        found: int = self._call(self._at, ctypes.byref(arms), address, item_bytes, root, self._growth_at)
        return found


@cache
def _best_arm() -> Any:
    library: Any = kernel_library()
    call = library.ygg_best_arm
    call.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_void_p]
    call.restype = ctypes.c_int64
    return call
