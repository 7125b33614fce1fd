"""Objects of the wire format: strict ones, and errors as OpenAI's clients expect them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

__all__ = ["UNKNOWN_FIELD", "ApiError", "Strict", "check_text"]

UNKNOWN_FIELD = "unknown_field"
MAX_MESSAGE = 600  # characters of an error message, which may contain what a client sent
MAX_PARAM = 100


def _one_line(text: str, most: int) -> str:
    """The beginning of a text as valid UTF-8; a client may have sent megabytes, and invalid characters."""
    shown = " ".join(text[: most + 1].encode("utf-8", "backslashreplace").decode().split())
    return shown if len(text) <= most else f"{shown[:most]}..."


class ApiError(Exception):
    """An HTTP error in OpenAI's format.

    Args:
        message: What is wrong and what would be right; a long message is cut.
        param: The wrong field.
        code: Error code for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _one_line(message, MAX_MESSAGE)
        self.param = None if param is None else _one_line(param, MAX_PARAM)
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object that OpenAI's clients expect."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def check_text(text: str, field: str) -> None:
    """Raise ApiError if a text has half of a surrogate pair, which JSON allows and UTF-8 does not."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        message = f"{field}: {half} at character {error.start} is half of a surrogate pair"
        raise ApiError(400, message, param=field) from None


class Strict(BaseModel):
    """An object whose unknown fields are errors, and in which null is the same as nothing."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        given = {name: value for name, value in fields.items() if value is not None}
        unknown = next((name for name in given if name not in cls.model_fields), None)
        if unknown is not None:  # only the first one; pydantic would collect all
            shown = _one_line(unknown, MAX_PARAM)
            raise PydanticCustomError(UNKNOWN_FIELD, "is not known", {"field": shown})
        return given
