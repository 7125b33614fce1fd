"""How many draft tokens the target will accept next, predicted from its last hidden state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from torch import Tensor

__all__ = ["DepthPredictor", "inputs_of"]

Array = npt.NDArray[np.float32]
LAYERS = ("encoder_1", "encoder_2", "heads")
MEAN = "mean_survival."


@dataclass(frozen=True)
class DepthPredictor:
    """A two-layer MLP encoder with one head per depth; scaling of the inputs and calibration of the heads are folded into the weights.

    Args:
        weights: "<layer>.weight", (inputs, outputs), and "<layer>.bias" of encoder_1, encoder_2 and heads.
        mean_survival: By temperature of the calibration text, (D,) the mean of what the predictor says there.

    Source: Yggdrasil section 4.2, "Draft Depth Prediction". Departures: the temperature is an input beside the hidden state,
    so that one predictor serves greedy and sampled text; heads are calibrated (Platt).
    """

    weights: Mapping[str, Array]
    mean_survival: Mapping[float, Array]

    def to_bytes(self) -> bytes:
        """A safetensors file with everything in it."""
        means = {f"{MEAN}{temperature}": mean for temperature, mean in self.mean_survival.items()}
        return safetensors.numpy.save({**self.weights, **means})

    @classmethod
    def from_bytes(cls, content: bytes) -> DepthPredictor:
        """What `to_bytes` wrote; raises SafetensorError or KeyError on anything else."""
        tensors = safetensors.numpy.load(content)
        means = {float(name.removeprefix(MEAN)): mean for name, mean in tensors.items() if name.startswith(MEAN)}
        if not means:
            raise KeyError(MEAN)
        return cls({f"{layer}.{part}": tensors[f"{layer}.{part}"] for layer in LAYERS for part in ("weight", "bias")}, means)

    @property
    def max_depth(self) -> int:
        return len(self.weights["heads.bias"])

    def growth(self, hidden_E: Tensor, temperature: float) -> Array:
        """The expected accepted length within depth d = 1..D, (D,), as a multiple of its mean on the training text."""
        nearest = min(self.mean_survival, key=lambda known: abs(known - temperature))
        growth: Array = self.survival(hidden_E, temperature).cumsum() / self.mean_survival[nearest].cumsum()
        return growth

    def survival(self, hidden_E: Tensor, temperature: float) -> Array:
        """P(accepted length >= d) for d = 1..D, (D,), never rising.

        Args:
            hidden_E: (E,) the target's last hidden state of the last accepted token.
            temperature: Of the sampling.

        Cost: three small matrix products on the host; on CUDA one sync for the hidden state.
        """
        survival: Array = self.survivals(inputs_of(hidden_E[None], temperature))[0]
        return survival

    def survivals(self, inputs_NX: Array) -> Array:
        """The same for many positions, (N, D), from `inputs_of`."""
        logits_ND = np.clip(self.logits(inputs_NX), -30.0, 30.0)
        survival: Array = np.minimum.accumulate(1.0 / (1.0 + np.exp(-logits_ND)), axis=-1)
        return survival

    def logits(self, inputs_NX: Array) -> Array:
        """(N, D) what the heads say before the sigmoid, each by itself."""
        activation = inputs_NX
        for layer in LAYERS[:-1]:
            activation = np.maximum(activation @ self.weights[f"{layer}.weight"] + self.weights[f"{layer}.bias"], 0.0)
        logits: Array = activation @ self.weights[f"{LAYERS[-1]}.weight"] + self.weights[f"{LAYERS[-1]}.bias"]
        return logits


def inputs_of(hidden_NE: Tensor, temperature: float) -> Array:
    """(N, E + 1) float32: hidden states and the temperature. # sync: the choice of a shape is the host's"""
    hidden = hidden_NE.float().cpu().numpy()
    return np.concatenate([hidden, np.full((len(hidden), 1), temperature, dtype=np.float32)], axis=1)
