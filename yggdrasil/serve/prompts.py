"""From clients' texts to tokens: prompts that cannot be served are refused early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from yggdrasil.serve.chat import ChatTemplate
from yggdrasil.serve.wire import ApiError, check_text
from yggdrasil.text.tokenizer import Tokenizer

__all__ = ["PromptEncoder"]

# Characters of a long text to encode first, per token of the context: about four times as many as fit.
PREFIX_CHARS = 16


@dataclass(frozen=True)
class PromptEncoder:
    """Turns prompts into tokens.

    Args:
        max_context: Largest number of tokens of prompt and output together.
        vocab: V: the token ids of both models go from 0 to V - 1.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    max_context: int
    vocab: int

    def tokens(self, prompt: str | Sequence[int], field: str) -> list[int]:
        """Encode a text or check token ids; raises the errors of `encode`."""
        return self.encode(prompt, field) if isinstance(prompt, str) else self._checked(prompt, field)

    def encode(self, text: str, field: str, *, special_tokens: bool = True) -> list[int]:
        """Encode the whole text.

        Raises:
            ApiError: invalid Unicode, more tokens than the context holds, or a token that the models lack.

        Cost: a text that is too long is encoded only as far as needed to detect it.
        """
        check_text(text, field)
        size = PREFIX_CHARS * self.max_context
        while size < len(text):
            # in a longer text the last tokens of a prefix may merge with others, but never half of them
            if len(self.tokenizer.encode(text[:size], special_tokens=False)) > 2 * self.max_context:
                limit = f"the context holds {self.max_context} tokens"
                message = f"{field}: {limit} and these {len(text)} characters take more; shorten it"
                raise ApiError(400, message, param=field, code="context_length_exceeded")
            size *= 2
        return self._checked(self.tokenizer.encode(text, special_tokens=special_tokens), field)

    def _checked(self, tokens: Sequence[int], field: str) -> list[int]:
        unknown = next((token for token in tokens if not 0 <= token < self.vocab), None)
        if unknown is not None:
            message = f"{field}: the models have no token {unknown}; ids go from 0 to {self.vocab - 1}"
            raise ApiError(400, message, param=field)
        return list(tokens)
