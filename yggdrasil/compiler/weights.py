"""The weight file of a bundle: written once, in the layout of the graphs, and mapped by every process.

A draft that is made from its target has some tensors of it, such as the embedding. They are in the target's
file alone, so they are in memory once, except in a server whose draft can leave (serve/elastic.py).

Forwards read weights up to 8 % faster from huge pages. A file system with large folios (XFS, ext4 since
Linux 6.16) gives them to a mapped file, if the mapping asks before the file is in memory, and reads it from
one end to the other. Pages that are in memory stay small, so a file that was just written is dropped from
there. The library does not ask, so we read the file first: its mapping then gets the same pages.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from yggdrasil.errors import ArtifactError
from yggdrasil.store.artifacts import unreadable

__all__ = ["FILE_NAME", "Lender", "load_weights", "save_weights"]

FILE_NAME = "weights.safetensors"
LENT = "#"  # between the folder of another file and a tensor in it
READ_BYTES = 64 << 20  # read before Python turns to Ctrl-C and to other threads


class Lender(NamedTuple):
    """The stored weights of the model that another one was made from.

    Args:
        folder: Its folder, next to that of the other model.
        name_before: The name of a tensor in it, from the name in the other model.
    """

    folder: Path
    name_before: Callable[[str], str]


def save_weights(model: nn.Module, folder: Path, lender: Lender | None = None) -> None:
    """Write `weights.safetensors`: every parameter and buffer of a packed model, tied ones once.

    Names are those of the constants of exported graphs: `model.` and the tensor's name in `model`.

    Args:
        lender: Tensors that are equal in its file are named, not written. For the CPU.
    """
    from safetensors.torch import save_file

    lent = {} if lender is None else load_weights(lender.folder, "cpu", "")
    unique: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        own = f"model.{name}"
        first = unique.setdefault(tensor.data_ptr(), own)
        before = f"model.{lender.name_before(name)}" if lender else ""
        if first != own:
            aliases[own] = aliases.get(first, first)
        elif lender and before in lent and _is_equal(tensor, lent[before]):
            aliases[own] = f"{lender.folder.name}{LENT}{before}"
        else:
            tensors[own] = tensor.detach().contiguous()
    # Tensors start right after the library's header. Aligning them to cache lines does not make a packed
    # linear layer faster (bench/LOG.md).
    save_file(tensors, folder / FILE_NAME, metadata=aliases)
    _drop_from_memory(folder / FILE_NAME)


def _drop_from_memory(path: Path) -> None:
    if not hasattr(os, "posix_fadvise"):  # macOS
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _is_equal(tensor: Tensor, other: Tensor) -> bool:
    return tensor.dtype == other.dtype and torch.equal(tensor, other)


def load_weights(folder: Path, device: str, command: str) -> dict[str, Tensor]:
    """The tensors of `save_weights` by name; tied ones are one tensor under several names.

    Those of another file come from there.

    Args:
        device: "cpu" maps the file, which is then in memory once for all processes; "cuda" copies it to the
            current device.
        command: The command that writes the file again, for the error.

    Raises:
        ArtifactError: the file is missing, unreadable or truncated.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / FILE_NAME
    try:
        if device == "cpu":
            _read_into_huge_pages(path)
        with safe_open(path, framework="pt", device=_current(device)) as file:
            names = file.keys()
            tensors: dict[str, Any] = {name: file.get_tensor(name) for name in names}
            aliases = file.metadata() or {}
    except OSError as error:
        raise unreadable(path, error, command) from None
    except SafetensorError as error:
        raise ArtifactError(path, f"corrupt ({error})", command) from None
    lenders = {first.partition(LENT)[0] for first in aliases.values() if LENT in first}
    for lender in lenders:
        lent = load_weights(folder.parent / lender, device, command)
        tensors |= {f"{lender}{LENT}{name}": tensor for name, tensor in lent.items()}
    named = {name: tensors[first] for name, first in aliases.items()}
    return {**{name: tensors[name] for name in names}, **named}


def _read_into_huge_pages(path: Path) -> None:
    # advice: a file system without large folios ignores it
    if not hasattr(mmap, "MADV_HUGEPAGE") or not path.stat().st_size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        mapped.madvise(mmap.MADV_HUGEPAGE)
        for begin in range(0, len(mapped), READ_BYTES):
            mapped[begin : begin + READ_BYTES : mmap.PAGESIZE]  # touches every page


def _current(device: str) -> str:
    # safetensors reads "cuda" as the first device
    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device
