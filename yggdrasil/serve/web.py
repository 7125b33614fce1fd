"""The page at `/`: three static files, which talk to the same server through its public routes.

The page holds no secret, so it is open; its requests send the key that its user has typed. Its policy of
contents allows nothing from another origin, no inline script and no frame around it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response

__all__ = ["PAGE_PATHS", "page_router"]

KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
FILES = {"/": "index.html", "/page/app.js": "app.js", "/page/style.css": "style.css"}
PAGE_PATHS = tuple(FILES)
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_router() -> APIRouter:
    """The routes of the page; its files are read once."""
    router = APIRouter(include_in_schema=False)
    folder = files("yggdrasil.serve") / "page"
    for path, name in FILES.items():
        content = (folder / name).read_bytes()
        kind = KINDS[name.rpartition(".")[2]]
        router.add_api_route(path, _route(content, f"{kind}; charset=utf-8"), methods=["GET", "HEAD"])
    return router


def _route(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    return answer
