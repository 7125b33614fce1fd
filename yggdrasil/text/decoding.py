"""Tokens to text while they come: what of a text is decoded and not yet taken."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

__all__ = ["ByteDecoder", "Decoder", "RecentDecoder", "Spelling"]

CONTEXT = 8  # earlier tokens that are decoded together with new ones
MOST_DECODED = 32  # tokens decoded in a step
UNKNOWN = "\ufffd"  # of bytes that are no character, or not yet


class Spelling(Protocol):
    """What a decoder needs of a tokenizer."""

    def decode(self, tokens: Sequence[int]) -> str: ...

    def bytes_of(self, tokens: Sequence[int]) -> bytes: ...


class Decoder(Protocol):
    """The text of a growing list of tokens, from where it was taken to its end."""

    def add(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""

    def text(self, *, final: bool) -> str:
        """The text that was not taken. A character that is not whole yet is U+FFFD, or, before the end of
        the text, left out.
        """

    def take(self, count: int) -> None:
        """Leave out this many characters at the beginning from now on."""


class RecentDecoder:
    """Decodes the latest tokens together: for every tokenizer.

    A character can span tokens, and a tokenizer may strip the blank at the beginning of a text.

    Args:
        after: Tokens before the text, such as a prompt's.
    """

    def __init__(self, tokenizer: Spelling, after: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        before = tokenizer.decode(after[-CONTEXT:])
        # if the prompt ends within a character, where its text ends is unknown
        is_whole = not before.endswith(UNKNOWN)
        self._tokens = list(after[-CONTEXT:]) if is_whole else []
        self._offset = len(before) if is_whole else 0  # characters of the decoded tokens that were taken
        self._older = ""  # text that was not taken, of tokens that are decoded no more

    def add(self, tokens: Sequence[int]) -> None:
        self._tokens.extend(tokens)

    def text(self, *, final: bool) -> str:
        decoded = self._tokenizer.decode(self._tokens)
        text = self._older + decoded[self._offset :]
        if len(self._tokens) > MOST_DECODED:
            self._forget_(decoded)
        return text

    def take(self, count: int) -> None:
        self._offset += max(0, count - len(self._older))
        self._older = self._older[count:]

    def _forget_(self, decoded: str) -> None:
        """Drop old tokens so that the cost of a step does not grow, unless a character spans the cut."""
        tokens = self._tokens[-2 * CONTEXT :]
        before = self._tokenizer.decode(tokens[:CONTEXT])
        recent = self._tokenizer.decode(tokens)[len(before) :]
        if decoded.endswith(recent) and not before.endswith(UNKNOWN):
            cut = len(decoded) - len(recent)
            self._older += decoded[self._offset : cut]
            self._offset = len(before) + max(0, self._offset - cut)
            self._tokens = tokens


class ByteDecoder:
    """Adds the bytes of the new tokens: for tokenizers whose text is nothing but the tokens' bytes.

    The text is that of `RecentDecoder`. After a forward, the library takes 35 us to decode a few tokens.
    """

    def __init__(self, tokenizer: Spelling) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""

    def add(self, tokens: Sequence[int]) -> None:
        self._text += self._utf8.decode(self._tokenizer.bytes_of(tokens))

    def text(self, *, final: bool) -> str:
        if final:
            self._text += self._utf8.decode(b"", True)
        return self._text

    def take(self, count: int) -> None:
        self._text = self._text[count:]
