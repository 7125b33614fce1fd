"""How many draft tokens the target will accept next, predicted from its last hidden state.

Shapes: here H = outputs of the encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from torch import Tensor

__all__ = ["PREDICTOR_FORMAT", "DepthPredictor", "Heads"]

Array = npt.NDArray[np.float32]
PREDICTOR_FORMAT = 2
ENCODER = ("encoder_1", "encoder_2")
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
    the weights.

    Args:
        encoder: "encoder_1" and "encoder_2", each ".weight", (inputs, outputs), and ".bias".
        heads: By temperature of the calibration text.

    Source: Yggdrasil section 4.2, "Draft Depth Prediction". Departures: heads for each temperature over
    built-in base rates; their deviations are calibrated, and their sum is shrunk to its mean by `trust`.
    """

    encoder: Mapping[str, Array]
    heads: Mapping[float, Heads]

    def to_bytes(self) -> bytes:
        """The predictor as a safetensors file."""
        parts = {
            f"{PREFIX}{temperature}.{name}": np.asarray(part)
            for temperature, heads in self.heads.items()
            for name, part in vars(heads).items()
        }
        return safetensors.numpy.save({**self.encoder, **parts})

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
        return cls({name: tensors[name] for name in names}, heads)

    @property
    def max_depth(self) -> int:
        return len(self._nearest(0.0).base_D)

    def _nearest(self, temperature: float) -> Heads:
        return self.heads[min(self.heads, key=lambda known: abs(known - temperature))]

    def at(self, temperature: float) -> Callable[[Tensor], Array]:
        """The predictor for one temperature, as a function of the target's last hidden state, (E,).

        The function returns (D,): the expected accepted length within depth d = 1..D, as a multiple of its
        mean on the calibration text. The hidden state is that of the last accepted token.

        Cost of a call: three small matrix products and a dozen small operators on the host; on CUDA one
        sync for the hidden state.
        """
        heads = self._nearest(temperature)
        first, bias_1, second, bias_2 = self._encoder()
        # a sigmoid is 0.5 + 0.5 * tanh(x / 2): halves, mean and trust are applied once, not in every call
        half = np.float32(0.5)
        weight_HD = half * heads.weight_HD
        bias_D = half * (heads.base_D + heads.bias_D)
        share_D = (0.5 * heads.trust / heads.mean_D.cumsum()).astype(np.float32)
        rest_D = (1 - heads.trust + np.arange(1, len(share_D) + 1) * share_D).astype(np.float32)
        zero = np.float32(0)

        def growth(hidden_E: Tensor) -> Array:
            state = hidden_E.float().cpu().numpy()  # sync: the host chooses the shape
            encoded = np.maximum(np.maximum(state @ first + bias_1, zero) @ second + bias_2, zero)
            tanh_D = np.minimum.accumulate(np.tanh(encoded @ weight_HD + bias_D))
            grown: Array = tanh_D.cumsum() * share_D + rest_D
            return grown

        return growth

    def survivals(self, hidden_NE: Array, temperature: float) -> Array:
        """P(accepted length >= d) for d = 1..D, (N, D), never rising with d."""
        return _survival(self._nearest(temperature).base_D + self.deviations(hidden_NE, temperature))

    def deviations(self, hidden_NE: Array, temperature: float) -> Array:
        """(N, D) what the heads add to the log-odds of the base rates."""
        heads = self._nearest(temperature)
        first, bias_1, second, bias_2 = self._encoder()
        encoded = np.maximum(np.maximum(hidden_NE @ first + bias_1, 0) @ second + bias_2, 0)
        deviations: Array = encoded @ heads.weight_HD + heads.bias_D
        return deviations

    def _encoder(self) -> list[Array]:
        return [self.encoder[f"{layer}.{part}"] for layer in ENCODER for part in ("weight", "bias")]


def _survival(logits_ND: Array) -> Array:
    """Sigmoids, (..., D), made non-increasing with depth."""
    # tanh does not overflow, unlike exp
    survival: Array = np.minimum.accumulate(0.5 + 0.5 * np.tanh(0.5 * logits_ND), axis=-1)
    return survival
