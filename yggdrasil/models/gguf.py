"""GGUF files: which ones are read. Transformers' own reader makes ordinary weights of their blocks.

A block of Q8_0 is 32 numbers of 8 bits with a scale, one of Q4_0 32 of 4 bits; scales are fp16. llama.cpp
writes the embeddings of a Q4_0 file in Q6_K.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from yggdrasil.errors import BrokenCheckpoint, ConfigError, UnsupportedModel, first_line
from yggdrasil.models.gguf_settings import check_settings, shown

__all__ = [
    "check_configuration",
    "check_gguf",
    "check_tokenizer",
    "check_whole",
    "gguf_format",
    "keep_words_",
    "sampling_settings",
    "tokenizer_settings",
]

INSTALL = "pip install 'yggdrasil-decoding[gguf]'"
BLOCKS: Final = ("Q8_0", "Q4_0")
TYPES: Final = (*BLOCKS, "F32", "F16", "BF16")
EMBEDDINGS: Final = ("token_embd.weight", "output.weight")
EMBEDDING_TYPES: Final = (*TYPES, "Q6_K")
KINDS: Final = {"general.type": ("model",), "split.count": (0, 1)}
"""Values of files that hold a whole model."""

GPT2_SPLITS: Final = ("gpt-2", "mpt", "olmo", "phi-2")
"""Tokenizers that split a text as the one of GPT-2 does."""

LIKE_LLAMA_3: Final = (
    "falcon-h1",
    "falcon3",
    "jina-v5-nano",
    "lfm2",
    "llama-bpe",
    "llama-v3",
    "llama3",
    "midm-2.0",
    "pixtral",
    "tekken",
)
"""Tokenizers of kind gpt2 that begin a text with a token unless the file denies it, and take a word of the
vocabulary as it is, without merging its parts. Source: llama.cpp."""

CHAT_TEMPLATE: Final = "tokenizer.chat_template"
TEMPLATES: Final = ("default", "tool_use")
SPECIAL_TOKENS: Final = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
}

SAMPLING: Final = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
"""Sampling that a file asks for, by the names of generation_config.json."""

UNAPPLIED: Final = {"mirostat": 0, "penalty_repeat": 1.0, "sequence": None, "xtc_probability": 0.0}
"""Sampling of llama.cpp without an equivalent here, with the value that has no effect."""


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
    for key, allowed in KINDS.items():
        field = reader.fields.get(key)
        if field is not None and field.contents() not in allowed:
            raise UnsupportedModel(path, f"a GGUF file with {key} = {field.contents()!r}")


def check_configuration(path: str, config: Any) -> None:
    """Check that a configuration that transformers' reader made has all settings of the file.

    Raises:
        UnsupportedModel: names the setting.
    """
    fields = _reader(path).fields
    architecture = fields["general.architecture"].contents()
    prefix = f"{architecture}."
    settings = {
        key.removeprefix(prefix): field.contents()
        for key, field in fields.items()
        if key.startswith(prefix)
    }
    check_settings(path, architecture, settings, config)


def check_tokenizer(path: str, tokenizer: Any) -> None:
    """Check that a tokenizer that transformers' reader made splits and surrounds texts as the file asks.

    Raises:
        UnsupportedModel: names the setting.
    """
    fields = _reader(path).fields

    def setting(name: str, default: Any = None) -> Any:
        field = fields.get(f"tokenizer.ggml.{name}")
        return default if field is None else field.contents()

    kind = setting("model")
    split = setting("pre")
    if kind == "gpt2" and split not in (*GPT2_SPLITS, *_known_splits()):
        raise UnsupportedModel(path, f"a GGUF file with tokenizer.ggml.pre = {split!r}")
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    found = tokenizer("a")["input_ids"]
    is_prefixed = tokenizer.convert_ids_to_tokens(bare[0]).startswith("\u2581")
    starts = setting("bos_token_id") is not None and (kind == "llama" or split in LIKE_LLAMA_3)
    read = {
        "add_bos_token": (starts, found[0] != bare[0]),
        "add_eos_token": (False, found[-1] != bare[-1]),
        "add_space_prefix": (kind == "llama" or is_prefixed, is_prefixed),
    }
    for name, (default, own) in read.items():
        if own != setting(name, default):
            absent = "" if f"tokenizer.ggml.{name}" in fields else " (absent)"
            raise UnsupportedModel(path, f"a GGUF file with tokenizer.ggml.{name} = {not own}{absent}")


def keep_words_(path: str, tokenizer: Any) -> None:
    """Let a tokenizer that transformers' reader made take whole words, if those of its kind do.

    Source: `ignore_merges` of llama.cpp, which the reader does not set.
    """
    field = _reader(path).fields.get("tokenizer.ggml.pre")
    if field is not None and field.contents() in LIKE_LLAMA_3:
        tokenizer.backend_tokenizer.model.ignore_merges = True


def _known_splits() -> Collection[str]:
    """Tokenizers of kind gpt2 that transformers' reader splits texts for; older versions know none."""
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping
    except ImportError:
        return ()
    known: Mapping[str, str] = gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS
    return known.keys()


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


def sampling_settings(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sampling that a file asks for: by the names of `generation_config.json`, and without equivalent.

    Raises:
        ConfigError, BrokenCheckpoint: as `check_gguf`.
    """
    prefix = "general.sampling."
    stored = {
        key.removeprefix(prefix): shown(field.contents())
        for key, field in _reader(path).fields.items()
        if key.startswith(prefix)
    }
    settings = {name: stored[key] for key, name in SAMPLING.items() if key in stored}
    top_k = settings.get("top_k")
    if isinstance(top_k, int):
        settings["top_k"] = max(top_k, 0)  # llama.cpp takes negative numbers as off, too
    if "temperature" in settings:
        settings["do_sample"] = settings["temperature"] > 0
    unapplied = {
        prefix + key: stored[key] for key, off in UNAPPLIED.items() if key in stored and stored[key] != off
    }
    return settings, unapplied


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
