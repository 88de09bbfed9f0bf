"""The HTTP application. Owns the routes, and the checks and errors common to all requests."""

import asyncio
from collections.abc import Awaitable, Callable

import orjson
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from services.gateway.endpoints import chat, completions
from services.gateway.endpoints.completion_service import SERVICE, CompletionService
from services.gateway.http import authentication, server
from services.gateway.http.errors import ApiError
from services.gateway.openai import openapi
from shared.log import Log

DOCUMENT = web.AppKey("document", bytes)
JSON = "application/json"
READINESS_RETRY_S = 5
"""Retry-After of /readyz: a restart or a new epoch takes about this long."""

_log = Log("gateway.http")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_PHRASES = {404: "This path does not exist.", 405: "This path does not support this method."}


def build(service: CompletionService) -> web.Application:
    """Return the HTTP application with all routes, whose handlers share `service`."""
    app = web.Application(middlewares=[handle_request])
    app[SERVICE] = service
    app.on_response_prepare.append(service.origin_policy.add_headers)
    document_content = openapi.document(
        service.config,
        service.tokenizer.vocab_size,
        needs_key=service.authenticator.needs_key,
        open_paths=service.authenticator.open_paths,
    )
    app[DOCUMENT] = orjson.dumps(document_content)
    app.router.add_post("/v1/chat/completions", chat.create)
    app.router.add_post("/v1/completions", completions.create)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{name:.+}", model)
    app.router.add_get("/v1/lockstep/status", status)
    app.router.add_get("/health", health)
    app.router.add_get("/livez", health)
    app.router.add_get("/readyz", readiness)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/openapi.json", document)
    return app


@web.middleware
async def handle_request(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Route a request, send its response to the end, and stop counting the request as open.

    It runs around every handler: checks origin and API key first, and turns errors into responses
    with OpenAI's error body.

    Args:
        request: the HTTP request.
        handler: answers the request on its path.
    """
    service = request.app[SERVICE]
    try:
        response = await _respond(service, request, handler)
        service.metrics.responses[response.status] += 1
        service.admission.release_body(request)
        await server.finish_response(request, response)
    finally:
        service.admission.remove(request)
    return response


async def _respond(
    service: CompletionService, request: web.Request, handler: _Handler
) -> web.StreamResponse:
    """Check origin and API key, run the handler, and turn every error into an API error."""
    response: web.StreamResponse | None
    try:
        service.origin_policy.check(request)
        response = service.origin_policy.preflight(request)
        if response is None:
            service.authenticator.check(request)
            response = await handler(request)
    except ApiError as error:
        response = error.response()
    except web.HTTPException as refusal:
        phrase = _PHRASES.get(refusal.status, refusal.reason)
        response = ApiError(refusal.status, phrase, close=refusal.status >= 400).response()
        if "Allow" in refusal.headers:
            response.headers["Allow"] = refusal.headers["Allow"]
    except (ConnectionError, BadHttpMessage, asyncio.CancelledError):
        raise
    except Exception:  # noqa: BLE001  # last resort of the process
        # The response has no details, because they may be internal.
        _log.exception("handler_failed", path=request.path, key=authentication.key_name(request))
        response = ApiError(500, "Internal error.", code="internal_error", close=True).response()
    return response


async def models(request: web.Request) -> web.Response:
    """Answer GET /v1/models with the list of served models, which has one entry."""
    return _json({"object": "list", "data": [_model(request.app[SERVICE])]})


async def model(request: web.Request) -> web.Response:
    """Answer GET /v1/models/{name} with the served model.

    Raises:
        ApiError: 404 for another name.
    """
    service = request.app[SERVICE]
    service.check_model(request.match_info["name"])
    return _json(_model(service))


async def health(_: web.Request) -> web.Response:
    """Answer GET /health and /livez with 200: the process runs its event loop."""
    return _json({"status": "ok"})


async def readiness(request: web.Request) -> web.Response:
    """Answer GET /readyz: 200 when new requests are served, else 503; the body has the reason."""
    reason = request.app[SERVICE].status.unready_reason()
    content = {"ready": not reason, "reason": reason}
    response = _json(content, status=503 if reason else 200)
    if reason:
        response.headers["Retry-After"] = str(READINESS_RETRY_S)
    return response


async def status(request: web.Request) -> web.Response:
    """Answer GET /v1/lockstep/status with readiness and the scheduler's last status."""
    return _json(request.app[SERVICE].status.as_json())


async def metrics(request: web.Request) -> web.Response:
    """Answer GET /metrics in Prometheus' text format."""
    service = request.app[SERVICE]
    service.metrics.open_requests = len(service.open_requests)
    return web.Response(
        body=service.metrics.exposition(),
        headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"},
    )


async def document(request: web.Request) -> web.Response:
    """Answer GET /openapi.json with the OpenAPI document."""
    return web.Response(body=request.app[DOCUMENT], content_type=JSON)


def _model(service: CompletionService) -> dict[str, object]:
    return {
        "id": service.config.served_name,
        "object": "model",
        "created": service.started_unix_s,
        "owned_by": "lockstep",
        "max_model_len": service.status.context_tokens_max or None,
    }


def _json(content: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type=JSON)
