"""Checkpoints of safetensors whose linear layers are whole numbers with scales.

A weight is (number - zero) * scale: the exact product, rounded once to the dtype of the model. Numbers are
stored without sign in words of 32 bits, the first one lowest.

    gptq                 qweight (I/8, O)        a word is 8 numbers of a column    scales, zeros (G, O)
    awq                  qweight (I, O/8)        8 columns, in the order AWQ_ORDER  scales, zeros (G, O)
    compressed-tensors   weight_packed (O, I/8)  8 numbers of a column; 4 of 8 bits weight_scale (O, G)

A group is `group_len` consecutive numbers along k, in GPTQ any that `g_idx` lists. Without zero points, the
zero is in the middle of the range. What else these formats can hold is refused by name: by the
configuration if that shows it, else when the tensors are read.

Shapes: O = output features, I = input features, G = groups, R = rows, J = words of a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from yggdrasil.errors import BrokenCheckpoint, UnsupportedModel
from yggdrasil.models.hub import read_json

__all__ = ["Scheme", "check_scheme", "ordinary_weights", "scheme_of"]

TITLES: Final = {"gptq": "GPTQ", "awq": "AWQ", "compressed-tensors": "compressed-tensors"}
PARTS: Final = {
    "gptq": {"qweight", "scales", "qzeros", "g_idx"},
    "awq": {"qweight", "scales", "qzeros"},
    "compressed-tensors": {"weight_packed", "weight_scale", "weight_shape"},
}
"""Tensors of a layer; a bias is stored as usual."""

STORED_LESS: Final = {"gptq": 1, "gptq_v2": 0}  # what GPTQ's formats subtract from zeros to store them
AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in its word of each of eight columns
WORD_BITS = 32


class Scheme(NamedTuple):
    """How a checkpoint stores its linear layers.

    Args:
        method: A key of `PARTS`.
        bits: Of a number.
        group_len: Numbers along k that share a scale; -1 for all of a column.
        stored_less: Subtracted from zeros when they were stored.
    """

    method: str
    bits: int
    group_len: int
    stored_less: int = 0

    def __str__(self) -> str:
        shared = f"groups of {self.group_len}" if self.group_len > 0 else "a scale for each column"
        return f"{TITLES[self.method]} int{self.bits}, {shared}"

    @property
    def zero(self) -> int:
        """The number that is stored for 0."""
        return 1 << (self.bits - 1)


def scheme_of(name: str) -> Scheme | None:
    """How a model's checkpoint stores its linear layers; None if they are ordinary weights.

    Args:
        name: Folder or hub id.

    Raises:
        UnsupportedModel: names what is not read.
    """
    settings = (read_json(name, "config.json") or {}).get("quantization_config")
    return None if settings is None else check_scheme(name, settings)


def check_scheme(name: str, settings: Any) -> Scheme:
    """The scheme that `quantization_config` describes.

    Raises:
        UnsupportedModel: names what is not read.
        BrokenCheckpoint: a setting has another form.
    """
    known = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors}
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if not isinstance(method, str) or method not in known:
        feature = f"a checkpoint with quantized weights ({method or 'method not named'})"
        raise UnsupportedModel(name, feature)
    try:
        problems, scheme = known[method](settings)
    except (AttributeError, TypeError):
        problem = f"quantization_config is none of {TITLES[method]}"
        raise BrokenCheckpoint(name, problem, "correct config.json") from None
    if not isinstance(scheme.group_len, int) or scheme.group_len < -1 or scheme.group_len == 0:
        problems[f"groups of {scheme.group_len!r}"] = True
    if found := [problem for problem, is_so in problems.items() if is_so]:
        raise UnsupportedModel(name, f"{_a_checkpoint(method)} with {found[0]}")
    return scheme


def _a_checkpoint(method: str) -> str:
    return f"{'an' if method == 'awq' else 'a'} {TITLES[method]} checkpoint"


def _gptq(settings: Mapping[str, Any]) -> tuple[dict[str, bool], Scheme]:
    bits = settings.get("bits")
    stored_as = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    problems = {
        f"{bits} bits": bits != 4,
        f"the format {stored_as!r}": stored_as not in STORED_LESS,
        "rules for single layers (dynamic)": bool(settings.get("dynamic")),
    }
    return problems, Scheme("gptq", 4, settings.get("group_size", 128), STORED_LESS.get(stored_as, 0))


def _awq(settings: Mapping[str, Any]) -> tuple[dict[str, bool], Scheme]:
    bits = settings.get("bits")
    stored_as = str(settings.get("version") or "gemm").lower()
    problems = {f"{bits} bits": bits != 4, f"the format {stored_as!r}": stored_as != "gemm"}
    return problems, Scheme("awq", 4, settings.get("group_size", 128))


def _compressed_tensors(settings: Mapping[str, Any]) -> tuple[dict[str, bool], Scheme]:
    groups = settings.get("config_groups") or {}
    only: Mapping[str, Any] = next(iter(groups.values()), {})
    weights = only.get("weights") or {}
    bits = weights.get("num_bits")
    strategy = weights.get("strategy")
    has_sparsity = (settings.get("sparsity_config") or {}).get("format", "dense") != "dense"
    problems = {
        f"the format {settings.get('format')!r}": settings.get("format") != "pack-quantized",
        f"{len(groups)} groups of layers": len(groups) != 1,
        "quantized activations": bool(only.get("input_activations") or only.get("output_activations")),
        "quantized keys and values": bool(settings.get("kv_cache_scheme")),
        "sparse weights": has_sparsity,
        f"{bits} bits": bits not in (4, 8),
        f"weights of type {weights.get('type', 'int')!r}": weights.get("type", "int") != "int",
        "zero points (symmetric = False)": not weights.get("symmetric", True),
        f"the strategy {strategy!r}": strategy not in ("group", "channel"),
        "groups out of order (actorder)": weights.get("actorder") in ("group", "dynamic", True),
    }
    group_len: Any = weights.get("group_size") if strategy == "group" else -1
    return problems, Scheme("compressed-tensors", bits if bits == 8 else 4, group_len)


def ordinary_weights(
    name: str, scheme: Scheme, files: Iterable[Path], places: Collection[str], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, with an ordinary weight for every stored layer.

    Args:
        name: Of the model, for errors.
        files: Its safetensors files.
        places: Names of the model's own tensors. Some tools write a bias of zeros for every layer; those
            without a place are left out.
        dtype: Of the weights.

    Raises:
        UnsupportedModel: words of another size, or zero points that cannot be known.
        BrokenCheckpoint: a layer lacks a tensor, or has another number of groups.
    """
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    stored: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for path in files:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (it is no mapping)
                layer, _, part = key.rpartition(".")
                if part in PARTS[scheme.method]:
                    stored[layer][part] = file.get_tensor(key)
                else:
                    tensors[key] = file.get_tensor(key)
    for layer, parts in stored.items():
        _check_parts(name, scheme, layer, parts)
        tensors[f"{layer}.weight"] = _weight(scheme, parts, dtype)
        bias = f"{layer}.bias"
        if bias not in places and bias in tensors and not tensors[bias].any():
            del tensors[bias]
    return tensors


def _check_parts(name: str, scheme: Scheme, layer: str, parts: Mapping[str, Tensor]) -> None:
    if missing := sorted(PARTS[scheme.method] - parts.keys() - {"g_idx", "qzeros"}):
        raise BrokenCheckpoint(name, f"{layer} has no {missing[0]}")
    words = parts["weight_packed" if scheme.method == "compressed-tensors" else "qweight"]
    if words.dtype != torch.int32:
        raise UnsupportedModel(name, f"{_a_checkpoint(scheme.method)} with words of {words.dtype}")
    # a zero of 0 was stored as -1, which changed the zeros next to it
    top = (1 << scheme.bits) - 1
    if scheme.stored_less and "qzeros" in parts and (_unpacked(parts["qzeros"], scheme.bits) == top).any():
        feature = f"a GPTQ checkpoint with zero points of 0 in the format 'gptq' (in {layer})"
        raise UnsupportedModel(name, feature)
    _check_groups(name, scheme, layer, parts)
    _check_sizes(name, scheme, layer, parts)
    if "g_idx" in parts:
        _check_index(name, scheme, f"{layer}.g_idx", parts)


def _check_groups(name: str, scheme: Scheme, layer: str, parts: Mapping[str, Tensor]) -> None:
    """Check that a layer has as many groups of scales as the configuration makes it."""
    in_features = _in_features(scheme, parts)
    is_compressed = scheme.method == "compressed-tensors"
    groups = parts["weight_scale"].shape[1] if is_compressed else len(parts["scales"])
    expected = -(-in_features // scheme.group_len) if scheme.group_len > 0 else 1
    if groups != expected:
        problem = f"{layer} has {groups} groups of scales, where config.json makes it {expected}"
        raise BrokenCheckpoint(name, problem, "correct group_size in config.json")


def _check_sizes(name: str, scheme: Scheme, layer: str, parts: Mapping[str, Tensor]) -> None:
    """Check that scales and zeros are of the size that the words of a layer make them."""
    if scheme.method == "compressed-tensors":
        return  # weight_shape has the sizes, and the model's shapes are compared with it
    per_word = WORD_BITS // scheme.bits
    groups = len(parts["scales"])
    words = parts["qweight"].shape[1]
    sizes = {"scales": [groups, words * (per_word if scheme.method == "awq" else 1)]}
    sizes["qzeros"] = [groups, -(-sizes["scales"][1] // per_word)]
    for part, expected in sizes.items():
        if part in parts and list(parts[part].shape) != expected:
            problem = f"{layer}.{part} is {list(parts[part].shape)}, where its words make it {expected}"
            raise BrokenCheckpoint(name, problem)


def _check_index(name: str, scheme: Scheme, key: str, parts: Mapping[str, Tensor]) -> None:
    """Check that every group of an index has a scale, and at most as many numbers as configured."""
    group_I = parts["g_idx"]
    in_features = _in_features(scheme, parts)
    if group_I.is_floating_point():
        raise BrokenCheckpoint(name, f"{key} is of {group_I.dtype}")
    if len(group_I) != in_features:
        problem = f"{key} names groups of {len(group_I)} numbers, where a column has {in_features}"
        raise BrokenCheckpoint(name, problem)
    if not 0 <= group_I.min() <= group_I.max() < len(parts["scales"]):
        raise BrokenCheckpoint(name, f"{key} names groups without a scale")
    most = int(group_I.bincount().max())
    allowed = scheme.group_len if scheme.group_len > 0 else in_features
    if most > allowed:
        problem = f"{key} makes a group of {most} numbers, where config.json makes it {allowed}"
        raise BrokenCheckpoint(name, problem, "correct group_size in config.json")


def _in_features(scheme: Scheme, parts: Mapping[str, Tensor]) -> int:
    if scheme.method == "compressed-tensors":
        return int(parts["weight_shape"][1])
    per_word = 1 if scheme.method == "awq" else WORD_BITS // scheme.bits
    return len(parts["qweight"]) * per_word


def _weight(scheme: Scheme, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The ordinary weight of a stored layer, (O, I)."""
    zero_OG = torch.tensor([[scheme.zero]])
    if scheme.method == "compressed-tensors":
        in_features = int(parts["weight_shape"][1])
        stored_OI = _unpacked(parts["weight_packed"], scheme.bits)[:, :in_features]
        scale_OG = parts["weight_scale"]
    else:
        order = AWQ_ORDER if scheme.method == "awq" else ()
        words = parts["qweight"]
        stored_OI = _unpacked(words, scheme.bits, order).T if order else _unpacked(words.T, scheme.bits)
        scale_OG = parts["scales"].T
        if "qzeros" in parts:
            zero_OG = _unpacked(parts["qzeros"], scheme.bits, order).T + scheme.stored_less
    group_len = scheme.group_len if scheme.group_len > 0 else stored_OI.shape[1]
    group_I = parts.get("g_idx", torch.arange(stored_OI.shape[1]) // group_len).long()
    number_OI = stored_OI - zero_OG.expand_as(scale_OG)[:, group_I]
    # exact in fp32: at most 8 bits times 11 bits
    return (number_OI.float() * scale_OG.float()[:, group_I]).to(dtype)


def _unpacked(word_RJ: Tensor, bits: int, order: Iterable[int] = ()) -> Tensor:
    """The numbers of words, (R, J * numbers of a word); `order` has the place of each in its word."""
    shift = torch.arange(0, WORD_BITS, bits)
    if order:
        shift = shift[list(order)]
    return ((word_RJ[..., None] >> shift) & ((1 << bits) - 1)).flatten(-2)
