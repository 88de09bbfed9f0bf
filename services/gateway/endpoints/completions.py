"""Endpoint POST /v1/completions. Owns checking prompts, which are texts or token ids."""

import array
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import msgspec
from aiohttp import web

from services.gateway.endpoints import completion_service
from services.gateway.endpoints.completion_service import SERVICE, CompletionService
from services.gateway.endpoints.fair_threads import Ticket
from services.gateway.http import request_body
from services.gateway.http.errors import invalid_field
from services.gateway.openai.request_types import PROMPTS_MAX, CompletionRequest, TokenId
from services.gateway.openai.response_formats import CompletionFormat
from services.gateway.openai.validation import CHOICES_TOTAL_MAX, RequestOptions, check_completion
from services.gateway.tokenizing.prompt import Prompt

BATCH_LENGTH_MAX = 65_536
"""Characters or tokens of several prompts that are encoded without a turn of another tenant; they
take less than 0.1 s."""
ECHO_LENGTH_MAX = 2_000_000
"""Characters or tokens of all prompts in an answer with `echo`, once per choice: writing their JSON
holds up the event loop for up to 20 ms."""

_decoder = msgspec.json.Decoder(CompletionRequest)


async def create(request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/completions: continue one or more prompts and send the completions.

    Raises:
        ApiError: when the request is refused, or fails before the response has begun.
    """
    service = request.app[SERVICE]
    parsed = await service.parse(request, functools.partial(_parse, service))
    service.admission.reserve_choices(request, len(parsed.prompts) * parsed.options.count)
    encode = functools.partial(_encode, service, echoes=parsed.echoes)
    works = [functools.partial(encode, batch) for batch in _batches(parsed.prompts)]
    batches = await service.encode(request, works, "prompt")
    encoded = [one for batch in batches for one in batch]
    echoes = [echo for _, echo in encoded for _ in range(parsed.options.count)]
    response_format = CompletionFormat(
        service.response_metadata("cmpl", parsed.options),
        service.tokenizer,
        echoes if parsed.echoes else [],
    )
    prompts = [prompt for prompt, _ in encoded]
    return await completion_service.respond(
        service, request, prompts, parsed.options, response_format, "prompt"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Parsed:
    """A checked completions request."""

    prompts: list[str | list[int]]
    options: RequestOptions
    echoes: bool
    """Each text begins with its prompt."""


def _parse(service: CompletionService, data: bytes) -> _Parsed:
    """Decode and check a body. Thread-safe.

    Raises:
        ApiError: when the request is refused.
    """
    body = request_body.decode(_decoder, data)
    service.check_model(body.model)
    options = check_completion(body, service.config)
    context = service.status.context_tokens_max
    _check_length(body.prompt, context)
    prompts = validate_prompts(body.prompt, service.tokenizer.vocab_size)
    if len(prompts) * options.count > CHOICES_TOTAL_MAX:
        raise invalid_field("prompt", f"prompts times n may be at most {CHOICES_TOTAL_MAX}.")
    for prompt in prompts:
        if context and isinstance(prompt, list) and len(prompt) >= context:
            raise completion_service.too_long(f"{len(prompt)} tokens", context, "prompt")
    lengths_chars = [len(prompt) for prompt in prompts if isinstance(prompt, str)]
    service.check_lengths(lengths_chars, "prompt")
    if body.echo and sum(map(len, prompts)) * options.count > ECHO_LENGTH_MAX:
        raise invalid_field(
            "echo",
            f"all echoed prompts together may have at most {ECHO_LENGTH_MAX} characters or tokens.",
        )
    return _Parsed(prompts, options, bool(body.echo))


def _batches(prompts: list[str | list[int]]) -> Iterator[list[str | list[int]]]:
    """Divide prompts into batches, after each of which other tenants may have their turn."""
    batch: list[str | list[int]] = []
    length = 0
    for prompt in prompts:
        if batch and length + len(prompt) > BATCH_LENGTH_MAX:
            yield batch
            batch, length = [], 0
        batch.append(prompt)
        length += len(prompt)
    yield batch


def _encode(
    service: CompletionService, batch: list[str | list[int]], ticket: Ticket, *, echoes: bool
) -> list[tuple[Prompt, str]]:
    """Return the token ids of each prompt, and its text if it is echoed.

    Raises:
        ApiError: 400 when a prompt is too long.
    """
    tokenizer = service.tokenizer
    context = service.status.context_tokens_max
    encoded: list[tuple[Prompt, str]] = []
    for prompt in batch:
        ticket.check()
        if isinstance(prompt, str):
            if tokenizer.surely_exceeds([prompt], context):
                length = f"more than {context} tokens"
                raise completion_service.too_long(length, context, "prompt")
            text, ids = prompt, tokenizer.encode_text(prompt)
        else:
            text, ids = tokenizer.decode(prompt) if echoes else "", prompt
        if context and len(ids) >= context:
            raise completion_service.too_long(f"{len(ids)} tokens", context, "prompt")
        encoded.append((Prompt(array.array("i", ids)), text))
    return encoded


def validate_prompts(prompt: str | list[Any], vocab_size: int) -> list[str | list[int]]:
    """Return the prompts as a list with one text, or one list of token ids, per prompt.

    Args:
        prompt: the request's field: a text, texts, token ids or lists of token ids.
        vocab_size: number of the model's token ids; larger ids are refused.

    Raises:
        ApiError: 400 when there is no prompt, there are too many, they have different types, or a
            token id is unknown.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid_field("prompt", "the list is empty.")
    first = prompt[0]
    if isinstance(first, str | list) and len(prompt) > PROMPTS_MAX:
        raise invalid_field("prompt", f"at most {PROMPTS_MAX} prompts are allowed.")
    if isinstance(first, str):
        prompts: list[Any] = _converted(prompt, list[str])
    elif isinstance(first, list):
        prompts = _converted(prompt, list[list[TokenId]])
    else:
        prompts = [_converted(prompt, list[TokenId])]
    for ids in prompts:
        if isinstance(ids, list) and max(ids, default=0) >= vocab_size:
            raise invalid_field(
                "prompt", f"the model has no token {max(ids)}, only 0 to {vocab_size - 1}."
            )
    return prompts


def _check_length(prompt: str | list[Any], context: int) -> None:
    """Refuse a list of token ids that is too long, before its elements are checked."""
    if context and isinstance(prompt, list) and len(prompt) > max(context, PROMPTS_MAX):
        raise completion_service.too_long(f"{len(prompt)} tokens", context, "prompt")


def _converted(value: Any, kind: Any) -> list[Any]:
    converted: list[Any] = request_body.convert(value, kind, "prompt")
    return converted
