"""Endpoint /v1/responses: makes responses, and returns and deletes stored ones."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from aiohttp import web

from services.gateway.dialects.responses import item_ids, reading, stored_items
from services.gateway.dialects.responses.reading import ReadResponsesRequest
from services.gateway.dialects.responses.request_types import ResponsesRequest
from services.gateway.dialects.responses.serializer import Keep, ResponsesSerializer
from services.gateway.dialects.responses.stored_items import Document
from services.gateway.dialects.responses.stored_responses import StoredResponses
from services.gateway.endpoints import answering
from services.gateway.endpoints.completion_service import SERVICE, CompletionService
from services.gateway.endpoints.request_threads import Ticket
from services.gateway.http import authentication, request_body
from services.gateway.http.admission import ADMITTED
from services.gateway.http.errors import ApiError, PromptTooLong, invalid_field, unsupported
from services.gateway.http.json_response import json_response

STORED_RESPONSES = web.AppKey("stored_responses", StoredResponses)

T = TypeVar("T")


def add_routes(app: web.Application, stored: StoredResponses) -> None:
    """Add the routes of the Responses API to an application.

    Args:
        app: the application.
        stored: access to stored responses.
    """
    app[STORED_RESPONSES] = stored
    app.router.add_post("/v1/responses", create)
    app.router.add_post("/v1/responses/input_tokens", count_input_tokens)
    app.router.add_get("/v1/responses/{response_id}", retrieve)
    app.router.add_delete("/v1/responses/{response_id}", delete)
    app.router.add_get("/v1/responses/{response_id}/input_items", list_input_items)


async def create(request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/responses: make a response and send it.

    Raises:
        ApiError: when the request is refused, or fails before the response has begun.
    """
    service = request.app[SERVICE]
    parsed = await service.parse(request, functools.partial(_parse, service))
    responses = request.app[STORED_RESPONSES]
    is_stored = _is_stored(parsed.body, responses)
    stored = _StoredItems(service, request, parsed.size_bytes)
    given = await _read(service, request, parsed, stored, is_stored=is_stored)
    metadata = service.response_metadata(item_ids.RESPONSE_PREFIX, parsed.body.model)
    keep: Keep | None = None
    kept_bytes = len(given.response_options.echo)
    if is_stored:
        owner, response_id = authentication.owner(request), metadata.response_id
        items = await _run(
            service,
            request,
            stored.size_bytes,
            functools.partial(stored_items.input_json, given.items, response_id),
        )

        kept_bytes += len(items)

        def keep(response: bytes) -> None:
            responses.keep(owner, response_id, stored_items.document(items, response))

    serializer = ResponsesSerializer(metadata, service.tokenizer, given.response_options, keep)
    conversation, options = given.conversation, given.options
    may_shorten = parsed.body.truncation == "auto"
    # An answer may take many minutes, in which the memory of its items is needed for others.
    del parsed, given
    while True:
        try:
            return await answering.converse(
                service, request, conversation, options, serializer, "input", kept_bytes
            )
        except PromptTooLong:
            # Nothing was sent yet.
            shorter = reading.shortened(conversation.messages)
            if not may_shorten or shorter is None:
                raise
            conversation.messages = shorter


async def count_input_tokens(request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/responses/input_tokens with the length of a request's prompt in tokens.

    Raises:
        ApiError: when the request is refused.
    """
    service = request.app[SERVICE]
    parsed = await service.parse(request, functools.partial(_parse, service))
    stored = _StoredItems(service, request, parsed.size_bytes)
    given = await _read(service, request, parsed, stored, is_stored=False)
    prompt = await answering.encode_conversation(service, request, given.conversation, "input")
    content = {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}
    return json_response(content)


async def retrieve(request: web.Request) -> web.StreamResponse:
    """Answer GET /v1/responses/{response_id} with a stored response.

    Raises:
        ApiError: 404 when no such response is stored; 400 for a stream of it.
    """
    if request.query.get("stream") == "true":
        raise unsupported("stream", "a stored response is sent as one body.")
    service = request.app[SERVICE]
    service.admission.admit(request).mark_read()
    document = await _stored_document(service, request, request.match_info["response_id"])
    return json_response(bytes(document.response))


async def delete(request: web.Request) -> web.StreamResponse:
    """Answer DELETE /v1/responses/{response_id}: delete a stored response.

    Raises:
        ApiError: 404 when no such response is stored.
    """
    request.app[SERVICE].admission.admit(request).mark_read()
    response_id = request.match_info["response_id"]
    owner = authentication.owner(request)
    if not await request.app[STORED_RESPONSES].delete(owner, response_id):
        raise _not_found(response_id, None)
    content = {"id": response_id, "object": "response", "deleted": True}
    return json_response(content)


async def list_input_items(request: web.Request) -> web.StreamResponse:
    """Answer GET /v1/responses/{response_id}/input_items with one page of its input.

    Raises:
        ApiError: 404 when no such response is stored; 400 for a wrong page.
    """
    service = request.app[SERVICE]
    service.admission.admit(request).mark_read()
    document = await _stored_document(service, request, request.match_info["response_id"])
    query = dict(request.query)
    content = await _run(
        service, request, len(document.input), lambda: stored_items.page(document, query)
    )
    return json_response(content)


@dataclasses.dataclass(frozen=True, slots=True)
class _Parsed:
    """A checked body."""

    body: ResponsesRequest
    ignored: list[str]
    """Fields without effect."""
    size_bytes: int


def _parse(service: CompletionService, data: bytes) -> _Parsed:
    """Decode and check a body. Thread-safe.

    Raises:
        ApiError: when the request is refused.
    """
    body, ignored = reading.decoder.decode(data)
    service.check_model(body.model)
    reading.check(body)
    return _Parsed(body, ignored, len(data))


class _StoredItems:
    """Reader of the stored items that one request names; they count as part of its body."""

    def __init__(self, service: CompletionService, request: web.Request, body_bytes: int) -> None:
        """Begin to read.

        Args:
            service: the parts that all handlers share.
            request: the HTTP request.
            body_bytes: bytes of its body.
        """
        self._service = service
        self._request = request
        self.size_bytes = body_bytes
        """Bytes of the body and of all that was read."""

    async def load(self, response_id: str, param: str) -> list[Any]:
        """Return all items of a stored response.

        Raises:
            ApiError: 404 that names the request field `param` when it is not stored.
        """
        document = await _stored_document(self._service, self._request, response_id, param)
        document_bytes = len(document.input) + len(document.response)
        self.size_bytes += document_bytes
        self._request[ADMITTED].reserve_body(self.size_bytes)
        return await _run(self._service, self._request, document_bytes, document.items)

    async def resolve(self, items: list[Any], earlier: list[Any]) -> list[Any]:
        """Return a request's items with the stored item in place of each reference.

        Args:
            items: the request's own items.
            earlier: items that were loaded already.

        Raises:
            ApiError: 404 when an item is not stored; 400 for references to too many responses.
        """
        known = stored_items.by_id(earlier)
        loaded: set[str] = set()
        for index, name in stored_items.references(items):
            param = f"input[{index}].id"
            response_id = item_ids.response_of(name)
            if name not in known and response_id is not None and response_id not in loaded:
                if len(loaded) == stored_items.REFERENCED_MAX:
                    problem = f"references to more than {len(loaded)} responses: send the items."
                    raise invalid_field("input", problem)
                loaded.add(response_id)
                known |= stored_items.by_id(await self.load(response_id, param))
            if name not in known:
                raise _not_found(name, param)
        return stored_items.resolved(items, known)


async def _read(
    service: CompletionService,
    request: web.Request,
    parsed: _Parsed,
    stored: _StoredItems,
    *,
    is_stored: bool,
) -> ReadResponsesRequest:
    """Return the meaning of a request, with the stored items that it names.

    Args:
        service: the parts that all handlers share.
        request: the HTTP request.
        parsed: its body.
        stored: reads the stored items.
        is_stored: the response will be stored.

    Raises:
        ApiError: when the request is refused, or names something that is not stored.
    """
    body, config = parsed.body, service.config
    earlier: list[Any] = []
    if body.previous_response_id is not None:
        earlier = await stored.load(body.previous_response_id, "previous_response_id")
    items = await stored.resolve(reading.own_items(body), earlier)
    given = await _run(
        service,
        request,
        stored.size_bytes,
        lambda: reading.read(body, earlier, items, config, is_stored=is_stored),
    )
    service.check_conversation(given.conversation, "input")
    service.report_ignored(request, parsed.ignored + given.ignored)
    return given


def _is_stored(body: ResponsesRequest, stored: StoredResponses) -> bool:
    """Return whether a response will be stored.

    Raises:
        ApiError: 400 or 503 when the request asks for it and there is no store.
    """
    if body.store is False or (body.store is None and not stored.is_on):
        return False
    if not stored.is_on:
        raise stored.refusal()
    return True


async def _stored_document(
    service: CompletionService, request: web.Request, response_id: str, param: str | None = None
) -> Document:
    """Return a stored response of the request's tenant.

    Raises:
        ApiError: 404 without one; 429 when the request's tenant has too many documents in memory;
            503 when the store does not answer.
    """
    owner = authentication.owner(request)
    data = await request.app[STORED_RESPONSES].load(owner, response_id)
    if data is None:
        raise _not_found(response_id, param)
    # The document, and the copy that is sent.
    admitted = request[ADMITTED]
    admitted.reserve_body(admitted.reserved_bytes + 2 * len(data))
    return await _run(service, request, len(data), lambda: stored_items.read_document(data))


async def _run(
    service: CompletionService, request: web.Request, size_bytes: int, work: Callable[[], T]
) -> T:
    """Return the result of work on this many bytes, which for many of them runs in a thread."""
    if size_bytes <= request_body.SMALL_BODY_BYTES:
        return work()
    return await service.decoders.run(Ticket(authentication.tenant(request)), work)


def _not_found(name: str, param: str | None) -> ApiError:
    return ApiError(
        404,
        f"Nothing with the id {name[:100]} is stored. Responses are kept with store, for a limited "
        "time: send all items instead.",
        param=param,
        code="not_found" if param is None else "previous_response_not_found",
    )
