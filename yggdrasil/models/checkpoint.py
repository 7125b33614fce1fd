"""Check that a folder holds a whole checkpoint with the shapes of its configuration.

Only names, sizes and headers of files are read, before anything is loaded or built.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from yggdrasil.errors import BrokenCheckpoint, ConfigError, first_line
from yggdrasil.models.hub import read_json

__all__ = ["check_pointers", "check_weights", "expected_shapes", "weight_files"]

POINTER = b"version https://git-lfs"
INDEX = ".index.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in the order in which transformers looks for them
MOST_HEADER_BYTES = 100_000_000  # the limit of safetensors


def check_pointers(folder: Path) -> None:
    """Raises BrokenCheckpoint if a file is a pointer to one that Git LFS did not fetch."""
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        with path.open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                raise BrokenCheckpoint(path, "a Git LFS pointer, not the file itself", "git lfs pull")


def check_weights(folder: Path, config: Any) -> None:
    """Check that every weight file is complete and that its tensors have the configured shapes.

    Raises:
        BrokenCheckpoint: names the first file that is missing or cut off, or the first tensor with another
            shape.
        ConfigError: transformers cannot build a model from the configuration.
    """
    expected = expected_shapes(folder, config)
    for path in weight_files(folder):
        for name, shape in _stored_shapes(path):
            if name in expected and shape != expected[name]:
                sizes = [" x ".join(map(str, each)) or "a number" for each in (shape, expected[name])]
                raise BrokenCheckpoint(path, f"{name} is {sizes[0]}, where config.json makes it {sizes[1]}")


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder that transformers would load weights from.

    Raises:
        BrokenCheckpoint: there are none, or one is missing.
    """
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        index = read_json(str(folder), name + INDEX)
        if index is not None:
            return _shards(folder / (name + INDEX), index)
    raise BrokenCheckpoint(
        folder, f"no weights: it has neither {' nor '.join(WEIGHTS)}, nor an index of several"
    )


def _shards(path: Path, index: dict[str, Any]) -> list[Path]:
    named = index.get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise BrokenCheckpoint(path, "it has no weight_map from tensors to files")
    shards = [path.parent / name for name in sorted(set(named.values()))]
    missing = [shard for shard in shards if not shard.is_file()]
    if missing:
        count = f"{len(missing)} of the {len(shards)} files that {path.name} names"
        raise BrokenCheckpoint(path.parent, f"{missing[0].name} is missing, {count}")
    return shards


def _stored_shapes(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes from a file's header; none for a pickle: only its end can be checked."""
    if path.suffix == ".safetensors":
        for name, entry in _header(path).items():
            yield name, tuple(entry["shape"])
        return
    with path.open("rb") as file:
        if file.read(2) == b"PK" and not zipfile.is_zipfile(path):
            raise BrokenCheckpoint(path, "cut off: the directory at its end is missing")


def _header(path: Path) -> dict[str, Any]:
    """Entries of the tensors in a safetensors file by name."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_len = int.from_bytes(file.read(8), "little")
        if size < 8 or header_len > min(MOST_HEADER_BYTES, size - 8):
            raise BrokenCheckpoint(path, f"cut off within its header, at {size} bytes")
        try:
            header = json.loads(file.read(header_len))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            ends = [int(entry["data_offsets"][1]) for entry in entries.values()]
            assert all(math.prod(entry["shape"]) >= 0 for entry in entries.values())
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            raise BrokenCheckpoint(path, "its header is no header of safetensors") from None
    needed = 8 + header_len + max(ends, default=0)
    if size < needed:
        raise BrokenCheckpoint(path, f"cut off: {size} bytes of {needed}")
    return entries


def expected_shapes(folder: Path, config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors by its configuration.

    Raises:
        ConfigError: transformers cannot build a model from it.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, trust_remote_code=False
            )
    # a model's constructor may raise any error for sizes that do not fit together
    except Exception as error:
        allowed = "one that transformers can build from its config.json"
        raise ConfigError("model", str(folder), allowed, first_line(error)) from None
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
