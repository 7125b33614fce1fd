"""The routes that report on the server: its model, its health, its state and its metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool

import yggdrasil
from yggdrasil.serve.metrics import CONTENT_TYPE_LATEST
from yggdrasil.serve.serving import Serving, serving_of
from yggdrasil.serve.wire import ApiError

__all__ = ["router"]

router = APIRouter()


@router.get("/v1/models")
async def models(http: HttpRequest) -> Response:
    """List the only model."""
    return JSONResponse({"object": "list", "data": [_model_card(serving_of(http))]})


@router.get("/v1/models/{model:path}")
async def model(http: HttpRequest, model: str) -> Response:
    """Describe the model by its name."""
    serving_of(http).check_model(model)
    return JSONResponse(_model_card(serving_of(http)))


@router.get("/version")
async def version() -> Response:
    """The version of this package."""
    return JSONResponse({"version": yggdrasil.__version__})


@router.get("/health")
@router.get("/ping")
@router.post("/ping")
async def health(http: HttpRequest) -> Response:
    """200 while requests are accepted, else 503."""
    serving = serving_of(http)
    state = "draining" if serving.is_draining else "ok" if serving.service.is_healthy else "failed"
    return JSONResponse({"status": state}, 200 if state == "ok" else 503)


@router.get("/server_info")
async def server_info(http: HttpRequest) -> Response:
    """State of the batch and the policy; SGLang's clients read it in `internal_states`."""
    serving = serving_of(http)
    if not serving.service.is_healthy:
        raise ApiError(503, "the decoding thread is not running")
    info = await run_in_threadpool(serving.service.info)
    card = {"model": serving.model, "chat_template": "model" if serving.template.is_own else "default"}
    if serving.template.takes_tools:
        card["tool_parser"] = serving.tool_parser
    return JSONResponse({**card, **info, "internal_states": [info]})


@router.get("/metrics")
async def metrics(http: HttpRequest) -> Response:
    """Metrics for Prometheus."""
    return Response(serving_of(http).metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _model_card(serving: Serving) -> dict[str, Any]:
    return {
        "id": serving.model,
        "object": "model",
        "created": serving.created,
        "owned_by": "yggdrasil",
        "max_model_len": serving.max_context,
    }
