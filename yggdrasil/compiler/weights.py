"""Weights as the graphs want them, stored once and mapped into memory by every later process.

```
length of the header, 8 bytes | header: JSON, padded with spaces | tensor | filler | tensor | tensor | filler | ...
                                                                 64       128                               every tensor begins at a multiple of 64 bytes
```
The format is safetensors', which has no gaps: what lies between two tensors is a tensor too, a *filler*. The library writes tensors in an order and at places
of its own, so the file is written here; it reads it back as any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from yggdrasil.errors import ArtifactError

__all__ = ["ALIGNMENT", "FILE_NAME", "has_weights", "load_weights", "save_weights"]

FILE_NAME: Final = "weights.safetensors"
ALIGNMENT: Final = 64  # of every tensor in the file: a cache line, and so a line of a packed weight
FILLER: Final = "filler."
DTYPES: Final = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.bool: "BOOL",
    torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip


def save_weights(model: nn.Module, folder: Path) -> None:
    """Write every parameter and buffer of a packed model, tied ones once, under the names that exported graphs use.

    Args:
        model: The transformers model, linear layers packed.
        folder: Gets `weights.safetensors`.
    """
    unique: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        first = unique.setdefault(tensor.data_ptr(), f"model.{name}")
        if first == f"model.{name}":
            tensors[first] = tensor.detach().contiguous()
        else:
            aliases[f"model.{name}"] = first
    _write(folder / FILE_NAME, _filled(tensors), aliases)


def _filled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in their order, with a filler behind each whose end is no multiple of ALIGNMENT."""
    filled: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        filled[name] = tensor
        if gap := -tensor.nbytes % ALIGNMENT:
            filled[FILLER + name] = torch.zeros(gap, dtype=torch.uint8)
    return filled


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file whose tensors lie one behind the other from a multiple of ALIGNMENT on."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(8 + len(encoded)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def load_weights(folder: Path, device: str, command: str) -> dict[str, Tensor]:
    """The tensors of `save_weights` by name, aliases included.

    Args:
        folder: With `weights.safetensors`.
        device: On the CPU the file is mapped, not read; "cuda" is the current device.
        command: What rebuilds it.

    Raises:
        ArtifactError: missing, truncated, or with a tensor that is not aligned.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / FILE_NAME
    try:
        with safe_open(path, framework="pt", device=_current(device)) as file:
            tensors: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys() if not name.startswith(FILLER)}  # noqa: SIM118 (not a dict)
            aliases = file.metadata() or {}
    except FileNotFoundError:
        raise ArtifactError(path, "missing", command) from None
    except SafetensorError as error:
        raise ArtifactError(path, f"corrupt ({error})", command) from None
    for name, tensor in tensors.items():
        if tensor.is_cpu and tensor.data_ptr() % ALIGNMENT:  # every line of a packed weight would straddle two cache lines
            raise ArtifactError(path, f"stale: {name} does not begin at a multiple of {ALIGNMENT} bytes", command)
    return {**tensors, **{name: tensors[first] for name, first in aliases.items()}}


def has_weights(folder: Path) -> bool:
    """Whether `load_weights` would load what is there. Cost: maps the file, reads its header alone."""
    try:
        load_weights(folder, "cpu", command="")
    except ArtifactError:
        return False
    return True


def _current(device: str) -> str:
    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device  # the library takes "cuda" for the first one
