"""Names of models as transformers' loaders take them: a folder, a hub id, or one GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["is_gguf", "loader_arguments"]


def is_gguf(name: str) -> bool:
    """Whether a model is one GGUF file, which holds configuration, tokenizer and weights."""
    return name.endswith(".gguf") and Path(name).is_file()


def loader_arguments(name: str) -> dict[str, Any]:
    """The arguments of `from_pretrained` that name a model."""
    if is_gguf(name):
        # transformers looks for a relative one in the working directory first
        path = Path(name).absolute()
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": str(path)}
    return {"pretrained_model_name_or_path": name}
