"""The tiny target in the formats of quantised checkpoints, packed number by number as they define it.

Shapes: O = output features, I = input features, G = groups, R = rows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word, the lowest bits first
LAYERS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
Packer = Callable[[Tensor, Tensor], dict[str, Tensor]]


def rounded(weight_OI: Tensor, group_len: int, bits: int) -> tuple[Tensor, Tensor]:
    """Numbers (O, I) and scales (O, G) in fp16."""
    weight_OGK = weight_OI.float().unflatten(1, (-1, group_len))
    zero = 1 << (bits - 1)
    scale_OG = (weight_OGK.abs().amax(dim=-1) / (zero - 1)).half()
    number_OGK = (weight_OGK / scale_OG.float()[..., None]).round().clamp(-zero, zero - 1)
    return number_OGK.flatten(1).long(), scale_OG


def words(stored_RI: Tensor, bits: int, order: Sequence[int] = ()) -> Tensor:
    """Rows of numbers without sign in words of 32 bits, the first of a word lowest."""
    count = 32 // bits
    stored_RI = torch.nn.functional.pad(stored_RI, (0, -stored_RI.shape[1] % count))
    found = np.zeros((len(stored_RI), stored_RI.shape[1] // count), dtype=np.uint32)
    for place, column in enumerate(order or range(count)):
        found |= stored_RI[:, column::count].numpy().astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(found.view(np.int32))


def gptq(number_OI: Tensor, scale_OG: Tensor) -> dict[str, Tensor]:
    groups = scale_OG.shape[1]
    return {
        "qweight": words(number_OI + 8, 4).T.contiguous(),
        "qzeros": words(torch.full((groups, len(number_OI)), 8 - 1), 4),
        "scales": scale_OG.T.contiguous(),
        "g_idx": (torch.arange(number_OI.shape[1]) * groups // number_OI.shape[1]).int(),
    }


def awq(number_OI: Tensor, scale_OG: Tensor) -> dict[str, Tensor]:
    return {
        "qweight": words(number_OI.T + 8, 4, AWQ_COLUMNS),
        "qzeros": words(torch.full((scale_OG.shape[1], len(number_OI)), 8), 4, AWQ_COLUMNS),
        "scales": scale_OG.T.contiguous(),
    }


def compressed_tensors(bits: int) -> Packer:
    def pack(number_OI: Tensor, scale_OG: Tensor) -> dict[str, Tensor]:
        return {
            "weight_packed": words(number_OI + (1 << (bits - 1)), bits),
            "weight_scale": scale_OG,
            "weight_shape": torch.tensor(number_OI.shape),
        }

    return pack


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": False, "version": "gemm"}


def compressed_settings(bits: int = 4, **changes: Any) -> dict[str, Any]:
    """The settings of compressed-tensors; changes are those of its weights."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
        **changes,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FORMATS: dict[str, tuple[dict[str, Any], int, Packer]] = {
    "GPTQ int4, groups of 32": (GPTQ, 4, gptq),
    "AWQ int4, groups of 32": (AWQ, 4, awq),
    "compressed-tensors int4, groups of 32": (compressed_settings(), 4, compressed_tensors(4)),
    "compressed-tensors int8, a scale for each column": (
        compressed_settings(8, strategy="channel", group_size=None),
        8,
        compressed_tensors(8),
    ),
}
"""Settings, bits of a number and the packer, by the name that `ygg compile` gives to the format."""


def save_stored(source: Path, folder: Path, name: str) -> dict[str, Tensor]:
    """The model with the layers of its blocks in a format; returns their weights, exact in fp32."""
    settings, bits, pack = FORMATS[name]

    def stored(weight_OI: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        group_len = weight_OI.shape[1] if "column" in name else GROUP
        number_OI, scale_OG = rounded(weight_OI, group_len, bits)
        scale_OI = scale_OG.float().repeat_interleave(group_len, dim=1)
        return number_OI.float() * scale_OI, pack(number_OI, scale_OG)

    return _save(source, folder, settings, stored)


def save_with_zeros(source: Path, folder: Path, name: str) -> dict[str, Tensor]:
    """The model in GPTQ's or AWQ's format with random numbers, scales, zeros and, in GPTQ, order of groups.

    Args:
        name: "gptq", "gptq_v2" or "awq".

    Returns:
        The weights of the layers, exact in fp32.
    """
    is_awq = name == "awq"
    settings = {**AWQ, "zero_point": True} if is_awq else {**GPTQ, "sym": False, "desc_act": True}
    draw = torch.Generator().manual_seed(1)

    def stored(weight_OI: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        out_features, in_features = weight_OI.shape
        groups = in_features // GROUP
        number_OI = torch.randint(16, (out_features, in_features), generator=draw)
        zero_GO = torch.randint(1, 16, (groups, out_features), generator=draw)
        scale_GO = torch.rand(groups, out_features, generator=draw).half()
        group_I = torch.arange(in_features) // GROUP
        if not is_awq:
            group_I = group_I[torch.randperm(in_features, generator=draw)]
        parts = {"scales": scale_GO}
        if is_awq:
            parts["qweight"] = words(number_OI.T, 4, AWQ_COLUMNS)
            parts["qzeros"] = words(zero_GO, 4, AWQ_COLUMNS)
        else:
            parts["qweight"] = words(number_OI, 4).T.contiguous()
            parts["qzeros"] = words(zero_GO - int(name == "gptq"), 4)
            parts["g_idx"] = group_I.int()
        return (number_OI - zero_GO.T[:, group_I]) * scale_GO.T.float()[:, group_I], parts

    return _save(source, folder, {**settings, "checkpoint_format": name}, stored)


def _save(
    source: Path,
    folder: Path,
    settings: dict[str, Any],
    stored: Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]],
) -> dict[str, Tensor]:
    """The model with other tensors for the layers of its blocks.

    Args:
        stored: From a layer's weight to the weight that it will have, and its tensors.

    Returns:
        The weights of the layers.
    """
    shutil.copytree(source, folder)
    set_config(folder, quantization_config=settings)
    tensors = {}
    weights = {}
    for key, tensor in load_file(source / "model.safetensors").items():
        layer = key.removesuffix(".weight")
        if "_proj" not in layer:
            tensors[key] = tensor
            continue
        weights[key], parts = stored(tensor)
        tensors |= {f"{layer}.{part}": each for part, each in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def set_config(folder: Path, **changes: Any) -> None:
    """Change the configuration of a model."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def save_gguf(
    source: Path,
    path: Path,
    kind: str,
    *,
    architecture: str = "llama",
    split: str = "gpt-2",
    **settings: Any,
) -> dict[str, Tensor]:
    """The tiny Llama as a GGUF file, its matrices in blocks of a kind; returns its weights in fp32.

    Args:
        split: How the tokenizer splits a text; empty to leave it out.
        settings: Further strings and numbers of the file by their keys, with `__` for a dot.
    """
    import gguf

    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    add = {str: writer.add_string, float: writer.add_float32, int: writer.add_int32, bool: writer.add_bool}
    for key, value in settings.items():
        add[type(value)](key.replace("__", "."), value)
    _add_tokenizer(writer, json.loads((source / "tokenizer.json").read_text())["model"], split)
    weights = {}
    for key, tensor in load_file(source / "model.safetensors").items():
        blocks = gguf.GGMLQuantizationType[kind if tensor.ndim == 2 else "F32"]
        stored = _permuted(key, tensor, config).numpy()
        packed = stored if tensor.ndim == 1 else gguf.quants.quantize(stored, blocks)
        writer.add_tensor(_gguf_name(key), packed, raw_dtype=blocks)
        # the same heads, in the other order of their features
        plain = packed if tensor.ndim == 1 else gguf.quants.dequantize(packed, blocks)
        weights[key] = _permuted_back(key, torch.from_numpy(np.copy(plain)), config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _add_tokenizer(writer: Any, model: dict[str, Any], split: str) -> None:
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    if split:
        writer.add_tokenizer_pre(split)
    writer.add_token_list(pieces)
    writer.add_token_types([3 if token == 0 else 1 for token in range(len(pieces))])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)


def _gguf_name(key: str) -> str:
    layer = key.removesuffix(".weight")
    if layer in NAMES:
        return f"{NAMES[layer]}.weight"
    _, _, block, kind = layer.split(".", 3)
    return f"blk.{block}.{LAYERS[kind]}.weight"


def _num_heads(key: str, config: dict[str, Any]) -> int:
    """Heads whose features llama.cpp interleaves, 0 for other layers."""
    counts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    kind = key.split(".")[-2]
    return int(config[counts[kind]]) if kind in counts else 0


def _permuted(key: str, weight_OI: Tensor, config: dict[str, Any]) -> Tensor:
    heads = _num_heads(key, config)
    if not heads:
        return weight_OI
    return weight_OI.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def _permuted_back(key: str, weight_OI: Tensor, config: dict[str, Any]) -> Tensor:
    heads = _num_heads(key, config)
    if not heads:
        return weight_OI
    return weight_OI.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
