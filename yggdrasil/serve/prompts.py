"""Texts of clients as tokens: what cannot be decoded here is refused before it costs anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from yggdrasil.serve.chat import ChatTemplate
from yggdrasil.serve.openai import ApiError, check_text
from yggdrasil.tokenizer import Tokenizer

__all__ = ["PromptEncoder"]

PREFIX_CHARS = 16  # of a long text for every token that the context holds: about four times what fits


@dataclass(frozen=True)
class PromptEncoder:
    """What turns prompts into tokens.

    Args:
        max_context: Most tokens of prompt and output together.
        vocab: V: the token ids of both models go from 0 up to this.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    max_context: int
    vocab: int

    def tokens(self, prompt: str | Sequence[int], field: str) -> list[int]:
        """A text encoded, or token ids checked; raises as `encode` does."""
        return self.encode(prompt, field) if isinstance(prompt, str) else self._checked(prompt, field)

    def encode(self, text: str, field: str, *, special_tokens: bool = True) -> list[int]:
        """The whole text as tokens.

        Raises:
            ApiError: no Unicode, more tokens than the context holds, or one that the models do not have.

        Cost: of a text that cannot fit, only what it takes to see that.
        """
        check_text(text, field)
        size = PREFIX_CHARS * self.max_context
        while size < len(text):
            # a longer text may join the last tokens of a prefix to others, never half of them
            if len(self.tokenizer.encode(text[:size], special_tokens=False)) > 2 * self.max_context:
                room = f"the context holds {self.max_context} tokens"
                message = f"{field}: {room} and these {len(text)} characters take more; shorten it"
                raise ApiError(400, message, param=field, code="context_length_exceeded")
            size *= 2
        return self._checked(self.tokenizer.encode(text, special_tokens=special_tokens), field)

    def _checked(self, tokens: Sequence[int], field: str) -> list[int]:
        unknown = next((token for token in tokens if not 0 <= token < self.vocab), None)
        if unknown is not None:
            message = f"{field}: the models have no token {unknown}; ids go from 0 to {self.vocab - 1}"
            raise ApiError(400, message, param=field)
        return list(tokens)
