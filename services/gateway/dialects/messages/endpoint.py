"""Endpoints POST /v1/messages and /v1/messages/count_tokens of Anthropic's API."""

import dataclasses
import functools

from aiohttp import web

from services.gateway.dialects.messages import reading, request_types
from services.gateway.dialects.messages.reading import ReadMessagesRequest
from services.gateway.dialects.messages.serializer import MessagesSerializer
from services.gateway.endpoints import answering
from services.gateway.endpoints.completion_service import SERVICE, CompletionService
from services.gateway.endpoints.request_options import (
    RequestOptions,
    checked_stops,
    most_likely,
    random_seed,
)
from services.gateway.http.errors import invalid_field
from services.gateway.http.ignored_fields import LenientDecoder
from services.gateway.http.json_response import json_response
from shared.configuration.settings import Config
from shared.messages import Sampling

_decoder = LenientDecoder(request_types.MessagesRequest, request_types.REFUSED_FIELDS)
_counted = LenientDecoder(request_types.CountTokensRequest, request_types.REFUSED_FIELDS)


async def create(request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/messages: complete a conversation and send the message.

    Raises:
        ApiError: when the request is refused, or fails before the response has begun.
    """
    service = request.app[SERVICE]
    parsed = await service.parse(request, functools.partial(_parse, service))
    service.report_ignored(request, parsed.read.ignored)
    cache = service.config.cache
    serializer = MessagesSerializer(
        service.response_metadata("msg_", parsed.options.model),
        cache.block_tokens if cache.enabled and parsed.read.has_cache_control else 0,
    )
    return await answering.converse(
        service, request, parsed.read.conversation, parsed.options, serializer, "messages"
    )


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/messages/count_tokens with the length of a conversation's prompt in tokens.

    Raises:
        ApiError: when the request is refused.
    """
    service = request.app[SERVICE]
    read = await service.parse(request, functools.partial(_parse_counted, service))
    service.report_ignored(request, read.ignored)
    prompt = await answering.encode_conversation(service, request, read.conversation, "messages")
    return json_response({"input_tokens": len(prompt.ids)})


@dataclasses.dataclass(frozen=True, slots=True)
class _Parsed:
    """A checked request."""

    read: ReadMessagesRequest
    options: RequestOptions


def _parse(service: CompletionService, data: bytes) -> _Parsed:
    """Decode and check a body. Thread-safe.

    Raises:
        ApiError: when the request is refused.
    """
    body, unknown = _decoder.decode(data)
    service.check_model(body.model)
    if body.messages[-1].role == "assistant":
        last = len(body.messages) - 1
        problem = "the conversation must end with a message that the model answers."
        raise invalid_field(f"messages[{last}]", problem)
    read = reading.read(body, unknown)
    service.check_conversation(read.conversation, "messages")
    return _Parsed(read, _options(body, service.config))


def _parse_counted(service: CompletionService, data: bytes) -> ReadMessagesRequest:
    """Decode and check the body of a request to count tokens. Thread-safe.

    Raises:
        ApiError: when the request is refused.
    """
    body, unknown = _counted.decode(data)
    service.check_model(body.model)
    read = reading.read(body, unknown)
    service.check_conversation(read.conversation, "messages")
    return read


def _options(body: request_types.MessagesRequest, config: Config) -> RequestOptions:
    top_p, top_k = most_likely(body.top_p, body.top_k)
    sampling = Sampling(
        seed=random_seed(),
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=top_p,
        top_k=top_k,
    )
    return RequestOptions(
        model=body.model,
        sampling=sampling,
        stops=checked_stops(body.stop_sequences or [], "stop_sequences", config.gateway),
        max_tokens=body.max_tokens,
        max_tokens_param="max_tokens",
        clamps_max_tokens=True,
        is_streamed=bool(body.stream),
        session_names=[reading.session_name(body.metadata)],
    )
