"""Settings of a GGUF file: the model has each of them, or the file is refused by name.

Transformers' reader takes some settings of an architecture and drops the others silently. So each one is
compared with the configuration that came of it, and one without a meaning here is refused, too.

Source: the keys of llama.cpp, and its defaults for absent ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from yggdrasil.errors import UnsupportedModel
from yggdrasil.models.support import kv_shape

__all__ = ["check_settings", "shown"]

SHAPES: Final = ("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size")
"""Sizes: other ones do not fit the tensors."""

UNUSED: Final = ("tensor_data_layout", "rope.scaling.finetuned")
EPSILONS: Final = ("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon")
OFF: Final = (0, False, "none")
"""Values that switch a setting off."""

FACTORS: Final = (
    "embedding_scale",
    "logit_scale",
    "residual_scale",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
)
"""Settings that a 1 switches off, too."""


def check_settings(path: str, architecture: str, settings: Mapping[str, Any], config: Any) -> None:
    """Check that a configuration has the settings of its file.

    Args:
        settings: Of the architecture, by their keys without its name.

    Raises:
        UnsupportedModel: names the first setting that is not read, or the value of an absent one.
    """
    for key, value in {**_defaults(config), **settings}.items():
        if not _is_read(key, value, settings, config):
            absent = "" if key in settings else " (absent)"
            raise UnsupportedModel(
                path, f"a GGUF file with {architecture}.{key} = {shown(value)!r}{absent}"
            )


def shown(value: Any) -> Any:
    """A value as it was written; numbers have 32 bits in a file: 0.1, not 0.10000000149."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _is_read(key: str, value: Any, settings: Mapping[str, Any], config: Any) -> bool:
    if key in (*SHAPES, *UNUSED):
        return True
    if key.startswith("rope.scaling.") and settings.get("rope.scaling.type") == "none":
        return True
    if key == "rope.scaling.original_context_length":
        return bool(value >= settings.get("context_length", math.inf))
    if key == "attention.sliding_window":
        is_window = 0 < value < getattr(config, "max_position_embeddings", math.inf)
        return not is_window or value == getattr(config, "sliding_window", None)
    if key in MEANINGS:
        return any(_same(value, own) for own in MEANINGS[key](config))
    return value in OFF or (key in FACTORS and value == 1)


def _same(value: Any, own: Any) -> bool:
    """Whether two values are equal; files have numbers of 32 bits."""
    if isinstance(value, float) and isinstance(own, int | float):
        return math.isclose(value, own, rel_tol=1e-6)
    return bool(value == own)


def _defaults(config: Any) -> dict[str, Any]:
    """What settings are where a file lacks them."""
    head_dim = kv_shape(config, 0).head_dim
    defaults: dict[str, Any] = {"attention.scale": head_dim**-0.5}
    if _rope(config):
        defaults |= {"rope.freq_base": 10_000.0, "rope.dimension_count": head_dim}
    return defaults


def _rope(config: Any, kind: str = "full_attention") -> Mapping[str, Any]:
    """Rotary parameters of a kind of layers; empty without rotary embeddings."""
    parameters = getattr(config, "rope_parameters", None) or {}
    own: Mapping[str, Any] = parameters.get(kind, parameters)
    return own


def _field(*names: str) -> Callable[[Any], Iterator[Any]]:
    return lambda config: (getattr(config, name) for name in names if hasattr(config, name))


def _switch(name: str) -> Callable[[Any], Iterator[Any]]:
    """A field whose absence is off."""
    return lambda config: iter([getattr(config, name, None) or 0])


def _head_dim(config: Any) -> Iterator[Any]:
    yield kv_shape(config, 0).head_dim


def _rotary_dim(config: Any) -> Iterator[Any]:
    if own := _rope(config):
        yield int(kv_shape(config, 0).head_dim * own.get("partial_rotary_factor", 1.0))


def _scale(config: Any) -> Iterator[Any]:
    """Of attention scores; a 0 stands for the usual one."""
    head_dim = kv_shape(config, 0).head_dim
    own = getattr(config, "query_pre_attn_scalar", None) or head_dim
    yield from [own**-0.5] + [0] * (own == head_dim)


def _base(kind: str) -> Callable[[Any], Iterator[Any]]:
    return lambda config: iter([_rope(config, kind).get("rope_theta")])


MEANINGS: Final[Mapping[str, Callable[[Any], Iterator[Any]]]] = {
    "attention.causal": lambda config: iter([True]),
    "attention.head_count": _field("num_attention_heads"),
    "attention.head_count_kv": lambda config: iter([kv_shape(config, 0).num_kv_heads]),
    "attention.key_length": _head_dim,
    "attention.value_length": _head_dim,
    "attention.layer_norm_epsilon": _field(*EPSILONS),
    "attention.layer_norm_rms_epsilon": _field(*EPSILONS),
    "attention.scale": _scale,
    "attn_logit_softcapping": _switch("attn_logit_softcapping"),
    "final_logit_softcapping": _switch("final_logit_softcapping"),
    "rope.dimension_count": _rotary_dim,
    "rope.freq_base": _base("full_attention"),
    "rope.freq_base_swa": _base("sliding_attention"),
    "use_parallel_residual": _switch("use_parallel_residual"),
}
"""Settings whose value is a value of the configuration."""
