"""How many draft tokens the target will accept next, predicted from its last hidden state and the root.

Shapes: here H = outputs of the encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from yggdrasil.kernels.prediction import DepthCall

__all__ = ["PREDICTOR_FORMAT", "DepthPredictor", "Heads"]

Array = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
PREDICTOR_FORMAT = 3
ENCODER = ("encoder_1", "encoder_2")
OF_ROOT = "of_root_VH"
PREFIX = "heads."


@dataclass(frozen=True)
class Heads:
    """The heads of one temperature.

    Args:
        weight_HD: (H, D) of the deviations.
        bias_D: (D,) of the deviations.
        base_D: (D,) log-odds of the shares on the calibration text: the prediction without any deviation.
        mean_D: (D,) mean prediction on the calibration text.
        trust: From 0 to 1: the part of a predicted deviation from the mean that is correct on unseen text.
    """

    weight_HD: Array
    bias_D: Array
    base_D: Array
    mean_D: Array
    trust: float = 1.0


@dataclass(frozen=True)
class DepthPredictor:
    """A two-layer MLP encoder with one head per depth and temperature.

    A head adds a deviation to the log-odds of its temperature's base rate. So temperatures share what the
    encoder sees, and never their base rates. Input scaling and the calibration of the heads are folded into
    the weights. The root is emitted, but no hidden state of the target contains it yet; what it adds to the
    first layer is a row of a table.

    Args:
        encoder: "encoder_1" and "encoder_2", each ".weight", (inputs, outputs), and ".bias".
        of_root_VH: (V, H) float16: the first layer's product with every token's embedding.
        heads: By temperature of the calibration text.

    Source: Yggdrasil section 4.2, "Draft Depth Prediction". Departures: the root is an input; heads for
    each temperature over built-in base rates; their deviations are calibrated, and their sum is shrunk to
    its mean by `trust`.
    """

    encoder: Mapping[str, Array] = field(repr=False)
    of_root_VH: npt.NDArray[np.float16] = field(repr=False)
    heads: Mapping[float, Heads] = field(repr=False)

    def to_bytes(self) -> bytes:
        """The predictor as a safetensors file."""
        parts = {
            f"{PREFIX}{temperature}.{name}": np.asarray(part)
            for temperature, heads in self.heads.items()
            for name, part in vars(heads).items()
        }
        return safetensors.numpy.save({**self.encoder, OF_ROOT: self.of_root_VH, **parts})

    @classmethod
    def from_bytes(cls, content: bytes) -> DepthPredictor:
        """The inverse of `to_bytes`; raises SafetensorError or KeyError on anything else."""
        tensors = safetensors.numpy.load(content)
        names = [f"{layer}.{part}" for layer in ENCODER for part in ("weight", "bias")]
        parts: dict[float, dict[str, Array]] = {}
        for name, tensor in tensors.items():
            if name.startswith(PREFIX):
                temperature, _, part = name.removeprefix(PREFIX).rpartition(".")
                parts.setdefault(float(temperature), {})[part] = tensor
        if not parts:
            raise KeyError(PREFIX)
        heads = {
            temperature: Heads(
                weight_HD=found["weight_HD"],
                bias_D=found["bias_D"],
                base_D=found["base_D"],
                mean_D=found["mean_D"],
                trust=float(found["trust"]),
            )
            for temperature, found in sorted(parts.items())
        }
        return cls({name: tensors[name] for name in names}, tensors[OF_ROOT], heads)

    @property
    def max_depth(self) -> int:
        return len(self._nearest(0.0).base_D)

    def _nearest(self, temperature: float) -> Heads:
        return self.heads[min(self.heads, key=lambda known: abs(known - temperature))]

    def call(self, temperature: float) -> DepthCall:
        """The predictor of one temperature in C++; `growth` is its specification.

        Cost: copies the weights once.
        """
        heads = self._nearest(temperature)
        first, first_bias, second, second_bias = self._encoder()
        # a sigmoid is 0.5 + 0.5 * tanh(x / 2): halves, mean and trust are applied once, not in every call
        share_D: Array = (0.5 * heads.trust / heads.mean_D.cumsum()).astype(np.float32)
        rest_D: Array = (1 - heads.trust + np.arange(1, len(share_D) + 1) * share_D).astype(np.float32)
        return DepthCall(
            {
                "first": first,
                "first_bias": first_bias,
                "second": second,
                "second_bias": second_bias,
                "heads": 0.5 * heads.weight_HD,
                "heads_bias": 0.5 * (heads.base_D + heads.bias_D),
                "share": share_D,
                "rest": rest_D,
            },
            self.of_root_VH,
        )

    def growth(self, hidden_NE: Array, root_N: Indices, temperature: float) -> Array:
        """(N, D) expected accepted length within d = 1..D, as a multiple of its mean on calibration text.

        Args:
            hidden_NE: The target's last hidden states: of the last accepted token.
            root_N: The tokens after it.
        """
        heads = self._nearest(temperature)
        multiple_ND = self.survivals(hidden_NE, root_N, temperature).cumsum(axis=1) / heads.mean_D.cumsum()
        grown: Array = 1 + heads.trust * (multiple_ND - 1)
        return grown

    def survivals(self, hidden_NE: Array, root_N: Indices, temperature: float) -> Array:
        """P(accepted length >= d) for d = 1..D, (N, D), never rising with d."""
        base_D = self._nearest(temperature).base_D
        return _survival(base_D + self.deviations(hidden_NE, root_N, temperature))

    def deviations(self, hidden_NE: Array, root_N: Indices, temperature: float) -> Array:
        """(N, D) what the heads add to the log-odds of the base rates."""
        heads = self._nearest(temperature)
        first, bias_1, second, bias_2 = self._encoder()
        summed_NH = hidden_NE @ first + bias_1 + self.of_root_VH[root_N]
        encoded_NH = np.maximum(np.maximum(summed_NH, 0) @ second + bias_2, 0)
        deviations: Array = encoded_NH @ heads.weight_HD + heads.bias_D
        return deviations

    def _encoder(self) -> list[Array]:
        return [self.encoder[f"{layer}.{part}"] for layer in ENCODER for part in ("weight", "bias")]


def _survival(logits_ND: Array) -> Array:
    """Sigmoids, (..., D), made non-increasing with depth."""
    # tanh does not overflow, unlike exp
    survival: Array = np.minimum.accumulate(0.5 + 0.5 * np.tanh(0.5 * logits_ND), axis=-1)
    return survival
