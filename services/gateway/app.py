"""The HTTP application. Owns the routes, and the checks and errors common to all requests."""

import asyncio
from collections.abc import Awaitable, Callable

import orjson
from aiohttp import hdrs, web
from aiohttp.http_exceptions import BadHttpMessage

from services.gateway.dialects import openapi
from services.gateway.dialects.messages import endpoint as messages
from services.gateway.dialects.messages import errors as messages_errors
from services.gateway.dialects.openai import chat, completions, tokens
from services.gateway.dialects.responses import endpoint as responses
from services.gateway.dialects.responses.stored_responses import StoredResponses
from services.gateway.endpoints import model_list, trace
from services.gateway.endpoints.completion_service import SERVICE, CompletionService
from services.gateway.http import authentication, ignored_fields, server
from services.gateway.http.errors import ApiError
from services.gateway.http.json_response import json_response
from services.gateway.tracing import trace_context
from services.gateway.tracing.traced_request import TRACED_REQUEST, TracedRequest
from shared.log import Log

DOCUMENT = web.AppKey("document", bytes)
READINESS_RETRY_S = 5
"""Retry-After of /readyz: a restart or a new epoch takes about this long."""

_log = Log("gateway.http")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_PHRASES = {404: "This path does not exist.", 405: "This path does not support this method."}


def build(service: CompletionService, stored_responses: StoredResponses) -> web.Application:
    """Return the HTTP application with all routes.

    Args:
        service: the parts that all handlers share.
        stored_responses: access to the responses that the cache store keeps.
    """
    app = web.Application(middlewares=[handle_request])
    app[SERVICE] = service
    app.on_response_prepare.append(service.origin_policy.add_headers)
    app.on_response_prepare.append(ignored_fields.add_header)
    document_content = openapi.document(
        service.config,
        service.tokenizer.vocab_size,
        needs_key=service.authenticator.needs_key,
        open_paths=service.authenticator.open_paths,
    )
    app[DOCUMENT] = orjson.dumps(document_content)
    app.router.add_post("/v1/chat/completions", chat.create)
    app.router.add_post("/v1/completions", completions.create)
    app.router.add_post("/v1/messages", messages.create)
    app.router.add_post("/v1/messages/count_tokens", messages.count_tokens)
    responses.add_routes(app, stored_responses)
    app.router.add_post("/tokenize", tokens.tokenize)
    app.router.add_post("/detokenize", tokens.detokenize)
    app.router.add_get("/v1/models", model_list.models)
    app.router.add_get("/v1/models/{name:.+}", model_list.model)
    # Claude Code asks for it, with HEAD, before its first request.
    app.router.add_get("/api/hello", health)
    app.router.add_get("/v1/lockstep/status", status)
    app.router.add_get("/v1/lockstep/trace", trace.trace)
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
    with the body of the path's dialect.

    Args:
        request: the HTTP request.
        handler: answers the request on its path.
    """
    service = request.app[SERVICE]
    request[TRACED_REQUEST] = traced = _begin_traced_request(service, request)
    try:
        response = await _respond(service, request, handler)
        service.metrics.responses[response.status] += 1
        # A body of stored items is in memory until a slow client has read it.
        body = response.body if isinstance(response, web.Response) else None
        service.admission.release_body(request, len(body) if isinstance(body, bytes) else 0)
        began_s = traced.recorder.clock.now()
        await server.finish_response(request, response)
        traced.status = response.status
        if traced.first_byte_s is None:
            traced.first_byte_s = began_s
        if isinstance(body, bytes) and traced.recorder.is_on:
            traced.add_write(began_s, request.writer.output_size)
    finally:
        service.admission.remove(request)
        service.tracing.end(traced)
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
            _begin_span(service, request)
            response = await handler(request)
    except ApiError as error:
        response = _error_response(request, error)
    except web.HTTPException as refusal:
        phrase = _PHRASES.get(refusal.status, refusal.reason)
        failure = ApiError(refusal.status, phrase, close=refusal.status >= 400)
        response = _error_response(request, failure)
        if "Allow" in refusal.headers:
            response.headers["Allow"] = refusal.headers["Allow"]
    except (ConnectionError, BadHttpMessage, asyncio.CancelledError):
        raise
    except Exception:  # noqa: BLE001  # last resort of the process
        # The response has no details, because they may be internal.
        fields = request[TRACED_REQUEST].log_fields
        _log.exception(
            "handler_failed", path=request.path, key=authentication.key_name(request), **fields
        )
        failure = ApiError(500, "Internal error.", code="internal_error", close=True)
        response = _error_response(request, failure)
    return response


def _begin_traced_request(service: CompletionService, request: web.Request) -> TracedRequest:
    """Return the record of a request, with the client's trace."""
    context = None
    if trace_context.TRACE_PARENT in request.headers:
        context = trace_context.read(
            request.headers.getall(trace_context.TRACE_PARENT),
            request.headers.getall(trace_context.TRACE_STATE, ()),
        )
    return service.tracing.recorder.begin(f"{request.method} {request.path}", context)


def _begin_span(service: CompletionService, request: web.Request) -> None:
    """Begin the exported span of a POST request, where spans are exported."""
    export, resource = service.tracing.export, request.match_info.route.resource
    if export is not None and resource is not None and request.method == hdrs.METH_POST:
        export.begin(request[TRACED_REQUEST], request.method, resource.canonical)


async def health(_: web.Request) -> web.Response:
    """Answer GET /health and /livez with 200: the process runs its event loop."""
    return json_response({"status": "ok"})


async def readiness(request: web.Request) -> web.Response:
    """Answer GET /readyz: 200 when new requests are served, else 503; the body has the reason."""
    service = request.app[SERVICE]
    reason = service.status.unready_reason()
    content = {"ready": not reason, "reason": reason, **service.output_formats}
    response = json_response(content, status=503 if reason else 200)
    if reason:
        response.headers["Retry-After"] = str(READINESS_RETRY_S)
    return response


async def status(request: web.Request) -> web.Response:
    """Answer GET /v1/lockstep/status with readiness and the scheduler's last status."""
    service = request.app[SERVICE]
    return json_response(service.status.as_json() | service.output_formats)


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
    return json_response(request.app[DOCUMENT])


def _error_response(request: web.Request, error: ApiError) -> web.Response:
    """Return the response for an error in the form of the dialect that the path belongs to."""
    request[TRACED_REQUEST].failure = error.code or str(error.status)
    if request.path.startswith("/v1/messages") or model_list.wants_anthropic(request):
        return messages_errors.response(error)
    return error.response()
