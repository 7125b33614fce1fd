"""`/openapi.json` and `/docs`: every route and every field, and nothing that is not there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from test_api import Running, server

import yggdrasil
from yggdrasil.serve.openai import ChatRequest, CompletionRequest
from yggdrasil.serve.responses import ResponsesRequest
from yggdrasil.serve.texts import DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with server() as running:
        yield running


@pytest.fixture(scope="module")
def description(shared: Running) -> dict[str, Any]:
    description: dict[str, Any] = shared.get("/openapi.json").json()
    return description


def test_every_described_route_is_there_and_takes_the_described_methods(
    shared: Running, description: dict[str, Any]
) -> None:
    assert description["info"] == {"title": "Yggdrasil", "version": yggdrasil.__version__}
    assert len(description["paths"]) == 15
    assert "422" not in str(description)
    assert "$ref" not in str(description)
    for path, methods in description["paths"].items():
        for method in ("get", "post"):
            called = path.replace("{model}", "tiny")
            status = (shared.get(called) if method == "get" else shared.post(called)).status_code
            assert (status == 405) == (method not in methods), path


@pytest.mark.parametrize(("path", "kind"), BODIES.items())
def test_every_field_of_a_request_is_described_without_references(
    description: dict[str, Any], path: str, kind: type[BaseModel]
) -> None:
    body = description["paths"][path]["post"]["requestBody"]
    schema = body["content"]["application/json"]["schema"]
    assert set(schema["properties"]) == set(kind.model_fields)
    assert "$ref" not in str(schema)
    required = [name for name, field in kind.model_fields.items() if field.is_required()]
    assert schema.get("required", []) == required


def test_the_page_names_every_route_and_field_and_loads_nothing(
    shared: Running, description: dict[str, Any]
) -> None:
    response = shared.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    page = response.text
    for path, methods in description["paths"].items():
        for method in methods:
            assert f"<code>{method.upper()} {path}</code>" in page
    for kind in BODIES.values():
        assert all(f"<td>{name}</td>" in page for name in kind.model_fields)
    assert re.search("<script|<link|https?:", page) is None
    assert "<td>speculation</td><td>&quot;off&quot; or &quot;auto&quot; or integer</td>" in page
