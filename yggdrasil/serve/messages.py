"""Messages of a conversation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from yggdrasil.serve.wire import Strict

__all__ = ["Message"]


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    """One message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str = ""

    def rendered(self) -> dict[str, str]:
        """The message for a template.

        A template may silently drop roles that it does not know, so `developer` becomes `system`.
        """
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        named = {"name": self.name} if self.name else {}
        return {"role": "system" if self.role == "developer" else self.role, "content": content, **named}
