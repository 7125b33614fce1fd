"""Load a Hugging Face causal LM from a folder or a hub id, refuse what we would decode wrongly, pack its linear layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from yggdrasil.errors import ConfigError, ModelMismatch, UnsupportedModel
from yggdrasil.kernels.linear import PackedLinear
from yggdrasil.kv import KVShape
from yggdrasil.models.attention import IMPLEMENTATION, register_attention

__all__ = [
    "check_supported",
    "check_vocabularies",
    "kv_shape",
    "load_config",
    "load_model",
    "order_linears_",
    "outline_linears_",
    "pack_linears_",
    "shared_vocab",
]

HEAD_DIM_STEP = 16  # lanes of the attention operator


def load_config(name: str) -> Any:
    """The transformers configuration of a local folder or a hub id, checked.

    Raises:
        ConfigError: no such folder and no such model on the hub.
        UnsupportedModel: an architecture that this runtime would decode wrongly.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError("model", name, "a folder with a config.json that transformers reads, or the id of a model on the hub", reason) from None
    check_supported(name, config)
    return config


def check_supported(name: str, config: Any) -> None:
    """Raises UnsupportedModel for what the tree attention does not express; called before anything is loaded."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(name, "an encoder-decoder")
    layers = getattr(config, "layer_types", None) or []
    if any(kind != "full_attention" for kind in layers):
        raise UnsupportedModel(name, f"layer type {next(kind for kind in layers if kind != 'full_attention')!r}")
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        raise UnsupportedModel(name, f"a sliding window of {window} tokens")
    for field in ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"):
        if getattr(config, field, None):
            raise UnsupportedModel(name, f"a mixture of experts ({field} = {getattr(config, field)})")
    if getattr(config, "attn_logit_softcapping", None):
        raise UnsupportedModel(name, "soft-capped attention scores")
    if hasattr(config, "text_config"):
        raise UnsupportedModel(name, "a multimodal model")
    if not hasattr(config, "num_attention_heads"):
        raise UnsupportedModel(name, f"an architecture without attention heads ({config.model_type})")
    head_dim = kv_shape(config, 0).head_dim
    if head_dim % HEAD_DIM_STEP:
        raise UnsupportedModel(name, f"a head dimension of {head_dim}, which is no multiple of {HEAD_DIM_STEP},")


def load_model(name: str, *, dtype: torch.dtype) -> Any:
    """The unmodified transformers model, in evaluation mode, with tree attention.

    Raises:
        ConfigError: not a loadable causal LM.
        UnsupportedModel: an architecture that this runtime would decode wrongly.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # loading is a step of our own progress display
    config = load_config(name)
    register_attention()
    try:
        model = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=dtype, attn_implementation=IMPLEMENTATION)
    except (OSError, ValueError) as error:
        raise ConfigError("model", name, "a causal LM that transformers loads", str(error).strip().splitlines()[0]) from None
    if model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
        raise UnsupportedModel(name, "a model without an output embedding")
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(name, f"{type(model).__name__}, whose attention cannot be replaced,")
    return model.eval().requires_grad_(False)  # type: ignore[no-untyped-call]


def pack_linears_(model: nn.Module, *, compress: bool = False, tick: Callable[[], None] = lambda: None) -> None:
    """Replace every `nn.Linear` by one that reads a packed copy: the summation order then depends on nothing but the layer. For the CPU.

    Args:
        model: Changed in place.
        compress: Keep bf16 weights in three quarters of their bytes (kernels/compression.py).
        tick: Called after every layer.
    """

    def pack(name: str, linear: nn.Linear) -> nn.Module:
        packed = PackedLinear.from_linear(linear, compress=compress)
        tick()
        return packed

    _replace_linears_(model, pack)


def outline_linears_(model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Replace every `nn.Linear` as `pack_linears_` did in another process, without values: for a compiler that reads shapes only.

    Args:
        model: Changed in place.
        stored: The packed weights by the name of their buffer, such as "lm_head.packed".
    """
    _replace_linears_(model, lambda name, linear: PackedLinear.like(linear, stored[f"{name}.packed"]))


def order_linears_(model: nn.Module) -> None:
    """Replace every `nn.Linear` by one that adds in the same order whatever runs beside it, on the same weights. For CUDA; changes `model` in place."""
    from yggdrasil.kernels.linear_triton import OrderedLinear  # imports Triton, which a CPU can do without

    _replace_linears_(model, lambda name, linear: OrderedLinear(linear))


def _replace_linears_(model: nn.Module, make: Callable[[str, nn.Linear], nn.Module]) -> None:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], make(name, module))


def kv_shape(config: Any, capacity: int) -> KVShape:
    """The cache that a model of this configuration needs."""
    heads = config.num_attention_heads
    return KVShape(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        capacity=capacity,
    )


def check_vocabularies(target: Any, draft: Any, num_ids: int | None) -> None:
    """Vocabularies may differ by padding: by ids that the tokenizer does not have.

    Args:
        target: Configuration of the target.
        draft: Configuration of the draft.
        num_ids: Of the tokenizer that both have, one more than the greatest id; None where the draft has none, and only the sizes can be compared.

    Raises:
        ModelMismatch: names both sizes.
    """
    sizes = target.vocab_size, draft.vocab_size
    if sizes[0] != sizes[1] and (num_ids is None or num_ids > min(sizes)):
        raise ModelMismatch("vocabulary size", f"{sizes[0]} tokens", f"{sizes[1]} tokens")


def shared_vocab(target: Any, draft: Any) -> int:
    """V of a pair: the ids that both models know. What one has beyond them is padding, stands for no text, and is neither guessed nor emitted."""
    return min(int(target.vocab_size), int(draft.vocab_size))
