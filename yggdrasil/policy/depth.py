"""How many draft tokens the target will accept next, predicted from its last hidden state.

Shapes: X = features of an input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from torch import Tensor

__all__ = ["DepthPredictor", "inputs_of"]

Array = npt.NDArray[np.float32]
LAYERS = ("encoder_1", "encoder_2", "heads")
MEAN = "mean_survival."
TRUST = "trust."


@dataclass(frozen=True)
class DepthPredictor:
    """A two-layer MLP encoder with one head per depth.

    Input scaling and head calibration are folded into the weights.

    Args:
        weights: "<layer>.weight", (inputs, outputs), and "<layer>.bias" of encoder_1, encoder_2 and heads.
        mean_survival: By temperature of the calibration text, (D,) the mean prediction there.
        trust: By temperature, from 0 to 1: the part of a predicted deviation from the mean that is correct
            on unseen text.

    Source: Yggdrasil section 4.2, "Draft Depth Prediction". Departures: the temperature is an input next to
    the hidden state, so that one predictor serves greedy and sampled text; heads are calibrated (Platt),
    and their sum is shrunk to its mean by `trust`.
    """

    weights: Mapping[str, Array]
    mean_survival: Mapping[float, Array]
    trust: Mapping[float, float]

    def to_bytes(self) -> bytes:
        """The predictor as a safetensors file."""
        means = {f"{MEAN}{temperature}": mean for temperature, mean in self.mean_survival.items()}
        trust = {f"{TRUST}{temperature}": np.array(share) for temperature, share in self.trust.items()}
        return safetensors.numpy.save({**self.weights, **means, **trust})

    @classmethod
    def from_bytes(cls, content: bytes) -> DepthPredictor:
        """The inverse of `to_bytes`; raises SafetensorError or KeyError on anything else."""
        tensors = safetensors.numpy.load(content)
        means = {
            float(name.removeprefix(MEAN)): mean for name, mean in tensors.items() if name.startswith(MEAN)
        }
        if not means:
            raise KeyError(MEAN)
        weights = {
            f"{layer}.{part}": tensors[f"{layer}.{part}"] for layer in LAYERS for part in ("weight", "bias")
        }
        return cls(
            weights, means, {temperature: float(tensors[f"{TRUST}{temperature}"]) for temperature in means}
        )

    @property
    def max_depth(self) -> int:
        return len(self.weights["heads.bias"])

    def at(self, temperature: float) -> Callable[[Tensor], Array]:
        """The predictor for one temperature, as a function of the target's last hidden state, (E,).

        The function returns (D,): the expected accepted length within depth d = 1..D, as a multiple of its
        mean on the calibration text. The hidden state is that of the last accepted token.

        Cost of a call: three small matrix products and a dozen small operators on the host; on CUDA one
        sync for the hidden state.
        """
        known = min(self.mean_survival, key=lambda other: abs(other - temperature))
        mean_D = self.mean_survival[known].cumsum()
        trust = np.float32(self.trust[known])
        first, second, heads = (self.weights[f"{layer}.weight"] for layer in LAYERS)
        bias_1, bias_2, bias_3 = (self.weights[f"{layer}.bias"] for layer in LAYERS)
        bias_1 = bias_1 + np.float32(temperature) * first[-1]
        first = np.ascontiguousarray(first[:-1])
        zero = np.float32(0)

        def growth(hidden_E: Tensor) -> Array:
            state = hidden_E.float().cpu().numpy()  # sync: the host chooses the shape
            encoded = np.maximum(np.maximum(state @ first + bias_1, zero) @ second + bias_2, zero)
            grown: Array = 1 + trust * (_survival(encoded @ heads + bias_3).cumsum() / mean_D - 1)
            return grown

        return growth

    def survivals(self, inputs_NX: Array) -> Array:
        """P(accepted length >= d) for d = 1..D, (N, D), never rising with d, from `inputs_of`."""
        return _survival(self.logits(inputs_NX))

    def logits(self, inputs_NX: Array) -> Array:
        """(N, D) outputs of the heads before the sigmoid."""
        activation = inputs_NX
        for layer in LAYERS[:-1]:
            activation = np.maximum(
                activation @ self.weights[f"{layer}.weight"] + self.weights[f"{layer}.bias"], 0.0
            )
        logits: Array = (
            activation @ self.weights[f"{LAYERS[-1]}.weight"] + self.weights[f"{LAYERS[-1]}.bias"]
        )
        return logits


def _survival(logits_ND: Array) -> Array:
    """Sigmoids, (..., D), made non-increasing with depth."""
    # tanh does not overflow, unlike exp
    survival: Array = np.minimum.accumulate(0.5 + 0.5 * np.tanh(0.5 * logits_ND), axis=-1)
    return survival


def inputs_of(hidden_NE: Tensor, temperature: float) -> Array:
    """(N, E + 1) float32 for training: hidden states and the temperature."""
    hidden = hidden_NE.float().cpu().numpy()
    return np.concatenate([hidden, np.full((len(hidden), 1), temperature, dtype=np.float32)], axis=1)
