"""What an operator changes while the server runs; only from this machine.

`POST /admin/speculation {"enabled": false}` decodes every request plainly from the next step on, and
`{"enabled": true}` speculates again. If the server has a key, these routes need it, too. A proxy on this
machine must not pass `/admin` on: its requests come from this machine.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from yggdrasil.serve.body import read_body
from yggdrasil.serve.describe import body_of
from yggdrasil.serve.serving import serving_of
from yggdrasil.serve.wire import ApiError, Strict

__all__ = ["router"]

router = APIRouter()


class SpeculationSwitch(Strict):
    """POST /admin/speculation."""

    enabled: bool


async def only_from_here(http: HttpRequest) -> None:
    """Refuse clients of other machines, and web pages, which a browser on this machine may show."""
    address = "" if http.client is None else http.client.host
    if not _is_loopback(address):
        message = f"{http.url.path} is for clients on the server's own machine"
        raise ApiError(403, message, code="loopback_only")
    if "origin" in http.headers:
        raise ApiError(403, f"{http.url.path} is not for web pages", code="loopback_only")


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)  # ::ffff:127.0.0.1, of a socket for both versions
    return (mapped or found).is_loopback


@router.post(
    "/admin/speculation", openapi_extra=body_of(SpeculationSwitch), dependencies=[Depends(only_from_here)]
)
async def speculation(
    http: HttpRequest, body: Annotated[SpeculationSwitch, Depends(read_body(SpeculationSwitch))]
) -> Response:
    """Switch speculation off or on for all requests; only from the server's own machine."""
    service = serving_of(http).service
    if not service.is_healthy:
        raise ApiError(503, "the decoding thread is not running")
    await run_in_threadpool(service.set_speculation, body.enabled)
    return JSONResponse({"speculation": body.enabled})
