"""Check a model's configuration for features that this runtime would decode wrongly.

Not every feature shows in a configuration: proof.py checks the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from yggdrasil.errors import UnsupportedModel
from yggdrasil.kv import KVShape
from yggdrasil.models.quantised import check_scheme

__all__ = ["ContextLimit", "check_supported", "context_limits", "kv_shape"]

HEAD_DIM_STEP = 16  # lanes of the attention operator
LAYER_TYPES = ("full_attention", "sliding_attention")
WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size", "window_size")
EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "moe_intermediate_size",
)
# fields of configurations, and the feature that a model has if the field is set
FEATURES = {
    "kv_lora_rank": "latent attention",
    "attention_chunk_size": "attention in chunks",
    "attn_logit_softcapping": "soft-capped attention scores",
    "alibi": "attention with ALiBi biases",
    "lconv_size": "convolution over tokens",
    "conv_L_cache": "convolution over tokens",
    "ssm_state_size": "a state-space layer",
    "mamba_d_state": "a state-space layer",
    "linear_num_value_heads": "linear attention",
    "num_kv_shared_layers": "keys and values that layers share",
}


class ContextLimit(NamedTuple):
    """The number of positions up to which this runtime computes a model exactly.

    Args:
        reason: The feature that sets the limit, to follow "it has".
    """

    num_positions: int
    reason: str


def check_supported(name: str, config: Any) -> None:
    """Raises UnsupportedModel for what this runtime does not read or decode; nothing is loaded."""
    if getattr(config, "quantization_config", None) is not None:
        check_scheme(name, config.quantization_config)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(name, "an encoder-decoder")
    if getattr(config, "is_heterogeneous", False):
        raise UnsupportedModel(name, "a model whose layers differ in size")
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            raise UnsupportedModel(name, f"layer type {kind!r}")
    for field in EXPERTS:
        if getattr(config, field, None):
            raise UnsupportedModel(name, f"a mixture of experts ({field} = {getattr(config, field)})")
    for field, feature in FEATURES.items():
        if getattr(config, field, None):
            raise UnsupportedModel(name, f"{feature} ({field} = {getattr(config, field)})")
    if hasattr(config, "text_config"):
        raise UnsupportedModel(name, "a multimodal model")
    sizes = ("num_attention_heads", "num_hidden_layers", "hidden_size", "vocab_size")
    if not all(hasattr(config, field) for field in sizes):
        raise UnsupportedModel(name, f"an architecture without attention heads ({config.model_type})")
    _check_class(name, config)
    head_dim = kv_shape(config, 0).head_dim
    if head_dim % HEAD_DIM_STEP:
        feature = f"a head dimension of {head_dim}, which is no multiple of {HEAD_DIM_STEP},"
        raise UnsupportedModel(name, feature)


def _check_class(name: str, config: Any) -> None:
    """Check that transformers has a causal LM of this configuration whose attention can be replaced."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        feature = f"an architecture that transformers has no causal LM for ({config.model_type})"
        raise UnsupportedModel(name, feature)
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not getattr(architecture, "_supports_attention_backend", False):
        raise UnsupportedModel(name, f"{architecture.__name__}, whose attention cannot be replaced,")


def context_limits(config: Any) -> list[ContextLimit]:
    """Limits of the context: sliding windows, and rotary embeddings that change with a text's length.

    Up to the length of its window, sliding attention is full attention.
    """
    windows = [ContextLimit(window, f"a sliding window of {window} tokens") for window in _windows(config)]
    return windows + [
        ContextLimit(limit, f"{kind!r} rotary embeddings that change beyond {limit} positions")
        for kind, limit in _changing_ropes(config)
    ]


def _windows(config: Any) -> Iterator[int]:
    kinds = getattr(config, "layer_types", None)
    if getattr(config, "use_sliding_window", True) and (kinds is None or "sliding_attention" in kinds):
        yield from (
            window
            for field in WINDOWS
            if isinstance(window := getattr(config, field, None), int) and window > 0
        )


def _changing_ropes(config: Any) -> Iterator[tuple[str, int]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    for each in [parameters, *(value for value in parameters.values() if isinstance(value, dict))]:
        kind = str(each.get("rope_type", ""))
        if "dynamic" in kind:
            yield kind, config.max_position_embeddings
        elif kind == "longrope":
            original = each.get("original_max_position_embeddings")
            yield kind, original or config.original_max_position_embeddings


def kv_shape(config: Any, capacity: int) -> KVShape:
    """The cache that a model of this configuration needs."""
    heads = config.num_attention_heads
    return KVShape(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        capacity=capacity,
    )
