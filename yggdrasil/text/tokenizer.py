"""Text to tokens and back: encoding, streaming decoding, stop texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from yggdrasil.errors import ArtifactError, ConfigError
from yggdrasil.text.decoding import UNKNOWN, ByteDecoder, Decoder, RecentDecoder

__all__ = ["TextStream", "Tokenizer", "keep_whole_"]

LONG_TEXT = 1 << 10  # characters


class Tokenizer:
    """A Hugging Face `tokenizer.json`, read without transformers, whose import takes seconds.

    It neither truncates nor pads.

    Args:
        command: Command that rebuilds the file, for the error.

    Raises:
        ArtifactError: the file is missing or not a tokenizer.
    """

    def __init__(self, path: Path, command: str) -> None:
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception for every cause
            raise ArtifactError(path, f"missing or corrupt ({error})", command) from None
        keep_whole_(self._tokenizer)
        self._bytes: dict[int, bytes] = {}  # of the tokens that `bytes_of` has met

    def __repr__(self) -> str:
        return f"Tokenizer({self.num_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        """Number of token ids that stand for text or are special."""
        size: int = self._tokenizer.get_vocab_size()
        return size

    @property
    def source(self) -> str:
        """The file's JSON."""
        source: str = self._tokenizer.to_str()
        return source

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `special_tokens` adds those that the tokenizer puts around a text.

        Cost: some microseconds per character; other threads run meanwhile if the text is long.
        """
        if len(text) < LONG_TEXT:
            encoded = self._tokenizer.encode(text, add_special_tokens=special_tokens)
        else:  # `encode` would hold the interpreter's lock for seconds per megabyte
            [encoded] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def spellings(self, texts: Sequence[str]) -> list[list[int]]:
        """The token sequences that spell texts, at the beginning of a line and after a blank.

        Raises:
            ConfigError: a text is empty, whose spelling after a blank would be the blank.
        """
        if not all(texts):
            raise ConfigError("ban", "", "a text that is not empty")
        found = [
            self.encode(prefix + text.lstrip(" "), special_tokens=False)
            for text in texts
            for prefix in ("", " ")
        ]
        return [list(tokens) for tokens in dict.fromkeys(map(tuple, found)) if tokens]

    def decode(self, tokens: Sequence[int], *, special_tokens: bool = False) -> str:
        """Text, by default without special tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=not special_tokens)
        return text

    def decoder(self, after: Sequence[int] = ()) -> Decoder:
        """Decodes a text while its tokens come.

        Args:
            after: Tokens before the text, such as a prompt's.
        """
        return ByteDecoder(self) if self.is_byte_level else RecentDecoder(self, after)

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether a text is nothing but the bytes of its tokens, those of GPT-2, Llama 3 and Qwen."""
        import tokenizers

        return isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel)

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        """The bytes of tokens of a byte-level tokenizer, of special ones none."""
        known = self._bytes
        for token in tokens:
            if token not in known:
                [piece] = [""] if self.is_special(token) else self.pieces([token])
                known[token] = _spelled(piece, otherwise=piece)
        return b"".join([known[token] for token in tokens])

    def is_special(self, token: int) -> bool:
        """Whether a token marks something and is no part of a text."""
        return token in self._special_tokens

    @cached_property
    def _special_tokens(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary spells them, such as `Ġfox`; empty for an id without a token."""
        return [self._tokenizer.id_to_token(token) or "" for token in tokens]

    def token_text(self, token: int) -> str:
        """One token as a person would read it in a tree."""
        return repr(self._tokenizer.decode([token], skip_special_tokens=False))

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes that a token adds within a text; part of a character if that spans tokens."""
        # A decoder may strip the blank at the beginning of a text: decode the token after another one.
        before = self._tokenizer.decode([self._anchor], skip_special_tokens=False)
        text: str = self._tokenizer.decode([self._anchor, token], skip_special_tokens=False)[len(before) :]
        if "\ufffd" not in text:
            return text.encode()
        piece: str = self._tokenizer.id_to_token(token) or ""
        if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):  # SentencePiece spells the bytes of rare characters
            return bytes.fromhex(piece[3:5])
        return _spelled(piece, otherwise=text)

    @cached_property
    def _anchor(self) -> int:
        """A token that consists of whole characters."""
        anchor: int = self._tokenizer.encode("a", add_special_tokens=False).ids[-1]
        return anchor


class TextStream:
    """Turns tokens into text that is never revised.

    A character can span tokens, and a stop text can span steps: text that could still change is held back.
    Text and tokens end at the first token that completes a stop text, in whatever steps the tokens come.

    Args:
        tokenizer: Decodes the tokens.
        stop: Texts that end the stream; neither they nor what follows is part of it.
        after: Tokens before the stream, such as a prompt's: a decoder may strip the blank at the beginning
            of a text, and the stream is not one.

    Attributes:
        num_tokens: Tokens of the stream, up to the one that completed a stop text.
        stopped: Whether a stop text was completed.

    Example: print text as it is decoded.
        >>> from yggdrasil import GenerateConfig, TextStream, load_pair
        >>> def write(prompt):
        ...     pair = load_pair()
        ...     tokens = pair.tokenizer.encode(prompt)
        ...     stream = TextStream(pair.tokenizer, after=tokens)
        ...     config = GenerateConfig(max_new_tokens=64)
        ...     for result in pair.engine.generate(tokens, pair.policy(), config):
        ...         print(stream.push(result.tokens), end="")
        ...     print(stream.finish())
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), after: Sequence[int] = ()) -> None:
        self._stop = tuple(stop)
        self._decoder = tokenizer.decoder(after)
        self._released: list[str] = []
        self.num_tokens = 0
        self.stopped = False

    def __repr__(self) -> str:
        return f"TextStream({self.text!r}, {self.num_tokens} tokens{', stopped' * self.stopped})"

    @property
    def text(self) -> str:
        """Everything released so far."""
        return "".join(self._released)

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens, up to the one that completes a stop text; returns the text that is now final."""
        if not self._stop:
            return self._add(tokens)
        # One by one: if a step completes two stop texts, the first one counts.
        return "".join(self._add([token]) for token in tokens if not self.stopped)

    def take(self, tokens: Sequence[int]) -> list[int]:
        """Like `push`, but returns the tokens up to the one that completes a stop text."""
        before = self.num_tokens
        self.push(tokens)
        return list(tokens[: self.num_tokens - before])

    def finish(self) -> str:
        """The rest: an unfinished character, or the beginning of a stop text."""
        return "" if self.stopped else self._release(final=True)

    def _add(self, tokens: Sequence[int]) -> str:
        self._decoder.add(tokens)
        self.num_tokens += len(tokens)
        return self._release(final=False)

    def _release(self, *, final: bool) -> str:
        decoded = self._decoder.text(final=final)
        end = len(decoded)
        for stop in self._stop:
            if 0 <= (found := decoded.find(stop)) < end:
                end = found
                self.stopped = True
        if not self.stopped and not final:
            end = self._whole_end(decoded)
        released = decoded[:end]
        self._decoder.take(end)
        self._released.append(released)
        return released

    def _whole_end(self, decoded: str) -> int:
        """Where the text ends that no later token can change or make a part of a stop text."""
        whole = decoded.rstrip(UNKNOWN)
        if not self._stop:
            return len(whole)
        return len(whole) - max(self._overlap(whole, stop) for stop in self._stop)

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Characters at the end of `text` that could begin `stop`."""
        return next(
            (
                length
                for length in range(min(len(stop) - 1, len(text)), 0, -1)
                if text.endswith(stop[:length])
            ),
            0,
        )


def keep_whole_(tokenizer: Any) -> None:
    """Switch off the truncation and the padding that the file may set for training."""
    tokenizer.no_truncation()
    tokenizer.no_padding()


class _Letters(dict[int, int]):
    """The bytes that the letters of byte-level tokenizers stand for: printable Latin-1 is itself, other
    bytes start at U+0100. What is no such letter becomes one that no byte is.
    """

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        super().__init__({byte: byte for byte in printable})
        self.update({256 + place: byte for place, byte in enumerate(others)})

    def __missing__(self, letter: int) -> int:
        return 0x100


_LETTERS = _Letters()


def _spelled(piece: str, *, otherwise: str) -> bytes:
    """The bytes that a token of a byte-level tokenizer spells; those of `otherwise` if it spells none."""
    try:
        return piece.translate(_LETTERS).encode("latin-1")
    except UnicodeEncodeError:
        return otherwise.encode()
