"""Weights as the graphs want them, stored once and mapped into memory by every later process."""

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
    """Write every parameter and buffer of a packed model, tied ones once, under the names that exported
    graphs use.

    Args:
        model: The transformers model, linear layers packed.
        folder: Gets `weights.safetensors`.
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
    # Tensors begin wherever the library's header ends: begun at cache lines, a packed linear layer that
    # streams from memory is no faster (bench/LOG.md).
    save_file(tensors, folder / FILE_NAME, metadata=aliases)


def load_weights(folder: Path, device: str, command: str) -> dict[str, Tensor]:
    """The tensors of `save_weights` by name, aliases included.

    Args:
        folder: With `weights.safetensors`.
        device: On the CPU the file is mapped, not read; "cuda" is the current device.

    Raises:
        ArtifactError: missing, unreadable or truncated.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / FILE_NAME
    try:
        with safe_open(path, framework="pt", device=_current(device)) as file:
            tensors: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            aliases = file.metadata() or {}
    except OSError as error:
        raise unreadable(path, error, command) from None
    except SafetensorError as error:
        raise ArtifactError(path, f"corrupt ({error})", command) from None
    return {**tensors, **{name: tensors[first] for name, first in aliases.items()}}


def _current(device: str) -> str:
    # the library takes "cuda" for the first one
    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device
