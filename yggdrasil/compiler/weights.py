"""The weight file of a bundle: written once, in the layout of the graphs, and mapped by every process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from yggdrasil.errors import ArtifactError
from yggdrasil.store.artifacts import unreadable

__all__ = ["FILE_NAME", "load_weights", "save_weights"]

FILE_NAME = "weights.safetensors"


def save_weights(model: nn.Module, folder: Path) -> None:
    """Write `weights.safetensors`: every parameter and buffer of a packed model, tied ones once.

    Names are those of the constants of exported graphs: `model.` and the tensor's name in `model`.
    """
    from safetensors.torch import save_file

    unique: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        first = unique.setdefault(tensor.data_ptr(), f"model.{name}")
        if first == f"model.{name}":
            tensors[first] = tensor.detach().contiguous()
        else:
            aliases[f"model.{name}"] = first
    # Tensors start right after the library's header. Aligning them to cache lines does not make a packed
    # linear layer faster (bench/LOG.md).
    save_file(tensors, folder / FILE_NAME, metadata=aliases)


def load_weights(folder: Path, device: str, command: str) -> dict[str, Tensor]:
    """The tensors of `save_weights` by name; tied ones are one tensor under several names.

    Args:
        device: "cpu" maps the file without reading it; "cuda" copies it to the current device.
        command: The command that writes the file again, for the error.

    Raises:
        ArtifactError: the file is missing, unreadable or truncated.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / FILE_NAME
    try:
        with safe_open(path, framework="pt", device=_current(device)) as file:
            names = file.keys()
            tensors: dict[str, Any] = {name: file.get_tensor(name) for name in names}
            aliases = file.metadata() or {}
    except OSError as error:
        raise unreadable(path, error, command) from None
    except SafetensorError as error:
        raise ArtifactError(path, f"corrupt ({error})", command) from None
    return {**tensors, **{name: tensors[first] for name, first in aliases.items()}}


def _current(device: str) -> str:
    # safetensors reads "cuda" as the first device
    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device
