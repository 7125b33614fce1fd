"""`/openapi.json` and `/docs`: the routes and the fields of their requests, from what checks the requests.

The page has no scripts and loads nothing, so that it can be read where there is no other network.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel

__all__ = ["body_of", "router"]

STYLE = "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto}td{padding-right:2em}"

router = APIRouter()


def body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """The part of a route's description that describes its body, an object of this kind."""
    schema = kind.model_json_schema()
    whole = _inlined(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": whole}}}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """A schema without references: they would lead to another place of the whole description."""
    if isinstance(schema, list):
        return [_inlined(entry, definitions) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(entry, definitions) for name, entry in schema.items()}


@router.get("/openapi.json")
async def openapi(http: HttpRequest) -> Response:
    """This server's routes in OpenAPI's form."""
    return JSONResponse(_description(http.app))


@router.get("/docs")
async def docs(http: HttpRequest) -> Response:
    """This server's routes as a page."""
    return HTMLResponse(_page(_description(http.app)))


def _description(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description, without the error of its own that no route answers with."""
    description = app.openapi()
    description.pop("components", None)
    for methods in description["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    return description


def _page(description: dict[str, Any]) -> str:
    title = escape(f"{description['info']['title']} {description['info']['version']}")
    routes = "".join(
        _route(f"{method.upper()} {path}", operation)
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    )
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body><h1>{title}</h1>{routes}</body></html>"


def _route(name: str, operation: dict[str, Any]) -> str:
    body = operation.get("requestBody")
    fields = "" if body is None else _fields(body["content"]["application/json"]["schema"])
    return f"<h2><code>{escape(name)}</code></h2><p>{escape(operation['description'])}</p>{fields}"


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        (name, _kind(field), "required" if name in required else json.dumps(field.get("default")))
        for name, field in schema["properties"].items()
    ]
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _kind(schema: dict[str, Any]) -> str:
    """The kind of a field's values in words."""
    if forms := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_kind, forms)))
    if "enum" in schema or "const" in schema:
        return " or ".join(map(json.dumps, schema.get("enum", [schema.get("const")])))
    if schema["type"] == "array":
        return f"list of {_kind(schema['items'])}"
    return str(schema["type"])
