"""The tokenizer of a model, read with transformers; a pair is decoded with the file that is made of it."""

from __future__ import annotations

from typing import Any

from yggdrasil.errors import ConfigError, UnsupportedModel, first_line
from yggdrasil.models.gguf import keep_words_
from yggdrasil.store.sources import is_gguf, loader_arguments
from yggdrasil.text.tokenizer import keep_whole_

__all__ = ["load_tokenizer"]


def load_tokenizer(name: str) -> Any:
    """The transformers fast tokenizer of a folder, hub id or GGUF file; it neither truncates nor pads.

    Raises:
        ConfigError: it is missing, cannot be read, or has no `tokenizer.json` form.
        UnsupportedModel: it needs code that comes with the model.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(**loader_arguments(name), trust_remote_code=False)
    except Exception as error:  # the library raises a bare Exception for a file that it cannot read
        if "trust_remote_code" in str(error):
            raise UnsupportedModel(name, "a tokenizer that brings code of its own to run") from None
        raise ConfigError("tokenizer", name, "a model with a tokenizer", first_line(error)) from None
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError("tokenizer", name, "a fast tokenizer (tokenizer.json)")
    keep_whole_(tokenizer.backend_tokenizer)
    if is_gguf(name):
        keep_words_(name, tokenizer)
    return tokenizer
