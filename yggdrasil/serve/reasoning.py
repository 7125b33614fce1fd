"""Reasoning and answer of a model that thinks aloud: `<think>I add.</think>It is 4.`

Reasoning is at the beginning of a text, or a template has already opened it at the end of the prompt. A
marker anywhere else is text. Blanks around markers belong to neither part. A text is read chunk by chunk as
it is decoded, and the parts do not depend on where it was cut.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CLOSING", "OPENING", "Part", "ReasoningParser", "separated"]

OPENING = "<think>"
CLOSING = "</think>"


class Part(NamedTuple):
    """The next characters of the reasoning or of the answer."""

    text: str
    is_reasoning: bool


def separated(text: str, *, is_open: bool = False) -> tuple[str, str]:
    """Reasoning and answer of a whole text.

    >>> separated("<think>I add.</think> It is 4.")
    ('I add.', 'It is 4.')
    """
    parser = ReasoningParser(is_open=is_open)
    parts = parser.push(text) + parser.finish()
    reasoning = "".join(part.text for part in parts if part.is_reasoning)
    return reasoning, "".join(part.text for part in parts if not part.is_reasoning)


class ReasoningParser:
    """Divides a text while it is decoded.

    Args:
        is_open: The prompt ends with the opening marker.

    >>> parser = ReasoningParser()
    >>> [part.text for chunk in ("<thi", "nk>I a", "dd.</", "think> It is") for part in parser.push(chunk)]
    ['I a', 'dd.', 'It is']
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self._held = ""
        self._skips_blanks = True
        self._read = self._read_reasoning if is_open else self._read_opening

    def push(self, text: str) -> list[Part]:
        """The parts that the next characters complete."""
        self._held += text
        parts: list[Part] = []
        while self._read(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """What was held back for a marker that did not come."""
        is_reasoning = self._read == self._read_reasoning
        rest = "" if self._read == self._read_answer and self._skips_blanks else self._held
        self._held = ""
        return [Part(rest, is_reasoning)] if rest else []

    def _read_opening(self, parts: list[Part]) -> bool:
        """Whether the text opens its reasoning; each reader returns whether another one has to go on."""
        text = self._held.lstrip()
        if OPENING.startswith(text) and text != OPENING:
            return False
        if text.startswith(OPENING):
            self._held = text.removeprefix(OPENING)
            self._read = self._read_reasoning
        else:
            self._skips_blanks = False
            self._read = self._read_answer
        return True

    def _read_reasoning(self, parts: list[Part]) -> bool:
        if self._skips_blanks:
            self._held = self._held.lstrip()
        text, mark, rest = self._held.partition(CLOSING)
        end = len(text.rstrip()) if mark else _end_of_known(text)
        if end:
            parts.append(Part(text[:end], True))
        self._skips_blanks = bool(mark) or (self._skips_blanks and not end)
        self._held = rest if mark else text[end:]
        if mark:
            self._read = self._read_answer
        return bool(mark)

    def _read_answer(self, parts: list[Part]) -> bool:
        text = self._held.lstrip() if self._skips_blanks else self._held
        self._held = ""
        if text:
            self._skips_blanks = False
            parts.append(Part(text, False))
        return False


def _end_of_known(text: str) -> int:
    """Characters that are reasoning whatever follows: blanks and a closing marker may just have begun."""
    begun = next(size for size in range(len(CLOSING) - 1, -1, -1) if text.endswith(CLOSING[:size]))
    return len(text[: len(text) - begun].rstrip())
