"""GGUF files: which ones are read. Transformers' own reader makes ordinary weights of their blocks.

A block of Q8_0 is 32 numbers of 8 bits with a scale, one of Q4_0 32 of 4 bits; scales are fp16. llama.cpp
writes the embeddings of a Q4_0 file in Q6_K.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from yggdrasil.errors import BrokenCheckpoint, ConfigError, UnsupportedModel, first_line

__all__ = ["check_gguf", "check_whole", "check_window", "gguf_format", "tokenizer_settings"]

INSTALL = "pip install 'yggdrasil-decoding[gguf]'"
BLOCKS: Final = ("Q8_0", "Q4_0")
TYPES: Final = (*BLOCKS, "F32", "F16", "BF16")
EMBEDDINGS: Final = ("token_embd.weight", "output.weight")
EMBEDDING_TYPES: Final = (*TYPES, "Q6_K")
ROPE_SCALING: Final = (".rope.scaling.type", ".rope.scaling.factor", ".rope.scale_linear")
UNSCALED: Final = (0, 1)
CHAT_TEMPLATE: Final = "tokenizer.chat_template"
TEMPLATES: Final = ("default", "tool_use")
SPECIAL_TOKENS: Final = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
}
WINDOW: Final = (".attention.sliding_window",)


def check_gguf(path: str) -> None:
    """Check that a file has only what is read exactly.

    Raises:
        ConfigError: a package is missing.
        BrokenCheckpoint: it is no GGUF file, or cut off.
        UnsupportedModel: names the types of tensors, or the setting, that are not read.
    """
    reader = _reader(path)
    if odd := sorted(set(_odd_types(reader))):
        raise UnsupportedModel(path, f"a GGUF file with tensors of type {', '.join(odd)}")
    # transformers' reader leaves them out
    scaling = dict(_settings(reader, ROPE_SCALING))
    for key, value in scaling.items():
        # the type "none" turns the factors off
        if value not in UNSCALED and "none" not in scaling.values():
            raise UnsupportedModel(path, f"a GGUF file with {key} = {value!r}")


def check_window(path: str, config: Any) -> None:
    """Check that a file's sliding window is the configuration's, or covers the context.

    Transformers' reader leaves it out for some architectures.

    Raises:
        UnsupportedModel: names the setting.
    """
    context_len = getattr(config, "max_position_embeddings", 0)
    for key, window in _settings(_reader(path), WINDOW):
        is_read = window == getattr(config, "sliding_window", None)
        if not is_read and 0 < window < context_len:
            raise UnsupportedModel(path, f"a GGUF file with {key} = {window}")


def check_whole(path: str, model: Any) -> None:
    """Check that every tensor of the file has a place in the model; transformers leaves others out.

    Raises:
        UnsupportedModel: gives the numbers of tensors.
    """
    stored = len(_reader(path).tensors)
    used = len({id(tensor) for tensor in model.parameters()})
    if stored != used:
        raise UnsupportedModel(path, f"a GGUF file with {stored} tensors for a model of {used}")


def gguf_format(path: str) -> str:
    """The block types of a file, such as "GGUF Q8_0"; empty if it has none."""
    found = {tensor.tensor_type.name for tensor in _reader(path).tensors}
    blocks = [block for block in BLOCKS if block in found]
    return " ".join(["GGUF", *blocks]) if blocks else ""


def tokenizer_settings(path: str) -> dict[str, Any]:
    """Chat templates by name and texts of special tokens, with the names of `tokenizer_config.json`.

    Raises:
        ConfigError, BrokenCheckpoint: as `check_gguf`.
    """
    fields = _reader(path).fields
    settings: dict[str, Any] = {}
    for key, field in fields.items():
        name = key.removeprefix(CHAT_TEMPLATE)
        if name in ("", *(f".{known}" for known in TEMPLATES)):
            settings.setdefault("chat_template", {})[name[1:] or TEMPLATES[0]] = field.contents()
    for key, name in SPECIAL_TOKENS.items():
        field = fields.get(f"tokenizer.ggml.{key}_token_id")
        texts = fields.get("tokenizer.ggml.tokens")
        if field is not None and texts is not None and field.contents() < len(texts.data):
            settings[name] = texts.contents(field.contents())
    return settings


def _settings(reader: Any, ends: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Keys with one of these ends, and their values."""
    for key, field in reader.fields.items():
        if key.endswith(ends):
            yield key, field.contents()


def _odd_types(reader: Any) -> Iterator[str]:
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name
        if kind not in (EMBEDDING_TYPES if tensor.name in EMBEDDINGS else TYPES):
            yield kind


def _reader(path: str) -> Any:
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        allowed = f"a folder or the id of a model on the hub: reading GGUF needs {' and '.join(missing)}"
        raise ConfigError("model", path, allowed, INSTALL)
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    # a damaged file fails anywhere within the reader
    except Exception as error:
        raise BrokenCheckpoint(Path(path), f"no whole GGUF file ({first_line(error)})") from None
