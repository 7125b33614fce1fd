"""From the bytes of a body to a request, without delaying the other clients.

While Python parses JSON, nothing else runs. The time depends on the number of values more than on the
number of bytes: 4 MiB of brackets take seconds. So values are counted first, and a large body is parsed in
a thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from yggdrasil.serve.wire import UNKNOWN_FIELD, ApiError

__all__ = ["MAX_BODY_BYTES", "MAX_VALUES", "check_counts", "checked", "read_body"]

MAX_BODY_BYTES = 4 << 20
# By the character that every value of a kind has; 64 prompts of 4096 tokens have as many values.
MAX_VALUES = {b"[": 1 << 13, b"{": 1 << 13, b":": 1 << 15, b",": 1 << 18}
MOST_LEVELS = 200  # Python has a limit, too, but a body that it can read may be too deep to be repeated
NAMES = {b"[": "lists", b"{": "objects", b":": "fields", b",": "values"}
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # as JSON writes it, also one of a whole pair
# As pydantic calls lists, texts, numbers and objects in a path, and objects in a message.
FORM = re.compile(r"\[|^str$|-int$|^([A-Z][a-z]+){2,}$")
OBJECT = re.compile(r"dictionary or instance of \w+")
EXPECTED = "Input should be "
OWN = "Value error, "  # before the message of a check of this server
SMALL_BYTES = 1 << 16  # parsed faster than a thread wakes up on a busy machine

Wire = TypeVar("Wire", bound=BaseModel)


def read_body(kind: type[Wire]) -> Callable[[HttpRequest], Awaitable[Wire]]:
    """Dependency of a route: the body as a request of this kind.

    Raises:
        ApiError: the body is not JSON, has too many values or an invalid text, or has a field that is not
            allowed.
    """

    async def read(http: HttpRequest) -> Wire:
        if not _is_json(http.headers.get("content-type", "")):
            raise ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
        try:
            body = await http.body()
        except ClientDisconnect:
            raise ApiError(499, "the client has gone") from None
        if len(body) <= SMALL_BYTES:
            return _parsed(body, kind)
        return await run_in_threadpool(_parsed, body, kind)

    return read


def _is_json(content_type: str) -> bool:
    """Whether the type is JSON; a page of another site can send any other type here without permission."""
    media_type = content_type.partition(";")[0].strip().lower()
    return re.fullmatch(r"application/(json|.+\+json)", media_type) is not None


def _parsed(body: bytes, kind: type[Wire]) -> Wire:
    check_counts(body)
    try:
        fields = json.loads(body.decode())
        if body.count(b"[") + body.count(b"{") > MOST_LEVELS:
            _check_levels(fields)
        if isinstance(fields, dict) and SURROGATE.search(body):
            _check_texts(fields)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not JSON: byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError:  # an integer of thousands of digits
        raise ApiError(400, "the body has a number with too many digits") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    return checked(lambda: kind.model_validate(fields))


def _check_levels(fields: Any) -> None:
    """Raise RecursionError if lists and objects are nested too deeply."""
    level = [fields]
    for _ in range(MOST_LEVELS):
        values = (each.values() if isinstance(each, dict) else each for each in level)
        level = [value for each in values for value in each if isinstance(value, dict | list)]
        if not level:
            return
    raise RecursionError


def _check_texts(fields: dict[str, Any]) -> None:
    """Raise ApiError for half of a surrogate pair anywhere: some fields come back, in UTF-8."""
    for name, value in fields.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise ApiError(400, f"{name}: {half} is half of a surrogate pair", param=name) from None


def checked(build: Callable[[], Wire], names: Mapping[str, str] | None = None) -> Wire:
    """A request that pydantic builds; raises ApiError for its first wrong field.

    Args:
        names: The client's names of fields that are called otherwise here.
    """
    try:
        return build()
    except ValidationError as error:
        raise _invalid(error, names or {}) from None


def check_counts(body: bytes) -> None:
    """Raise ApiError if a text of JSON has too many values: parsing them would delay other clients."""
    if all(body.count(separator) <= most for separator, most in MAX_VALUES.items()):
        return
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # now every quotation mark is one of a pair
    max_strings = sum(MAX_VALUES.values())  # after a string there is a separator or the end of a container
    if unescaped.count(b'"') > 2 * max_strings:
        raise _too_many(max_strings, "strings")
    outside = b"".join(unescaped.split(b'"')[::2])
    for separator, most in MAX_VALUES.items():
        if outside.count(separator) > most:
            raise _too_many(most, NAMES[separator])


def _too_many(most: int, name: str) -> ApiError:
    message = f"the body has more than {most} {name}; send fewer, in several requests"
    return ApiError(400, message, code="too_many_values")


def _invalid(error: ValidationError, names: Mapping[str, str]) -> ApiError:
    """An error for the first wrong field.

    If a value may have several forms, the error is that of the form that goes furthest without a fault,
    which the client meant; if several go as far, it has all that pydantic would accept at this place, or
    the first unknown field.
    """
    errors = error.errors(include_url=False, include_input=False)
    field = errors[0]["loc"][:1]  # nothing if the request itself has an unknown field
    first = max((each for each in errors if each["loc"][:1] == field), key=_progress)
    place = _place(first["loc"])
    path = [*(names.get(part, part) for part in place[:1]), *place[1:]]
    if first["type"] == UNKNOWN_FIELD:
        path.append(first["ctx"]["field"])
        message = f"{'.'.join(path)} is not a field of this server's requests; leave it out"
        return ApiError(400, message, param=path[0], code="unknown_parameter")
    complaints = dict.fromkeys(
        OBJECT.sub("object", each["msg"].removeprefix(OWN))
        for each in errors
        if _place(each["loc"]) == place
    )
    message = " or ".join(complaints).replace(f" or {EXPECTED}", " or ")
    return ApiError(400, f"{'.'.join(path)}: {message}", param=path[0])


def _progress(error: ErrorDetails) -> tuple[int, bool]:
    """How far a form goes without a fault; one with an unknown field goes further than a wrong type."""
    return len(error["loc"]), error["type"] == UNKNOWN_FIELD


def _place(loc: Sequence[int | str]) -> list[str]:
    """Where an error is, without pydantic's names of the forms that a value may have."""
    return [str(part) for part in loc if not FORM.search(str(part))]
