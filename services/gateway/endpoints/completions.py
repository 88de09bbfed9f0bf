"""Endpoint POST /v1/completions. Owns checking prompts, which are texts or token ids."""

from typing import Any

import msgspec
from aiohttp import web

from services.gateway.endpoints import completion_service
from services.gateway.endpoints.completion_service import SERVICE
from services.gateway.http import request_body
from services.gateway.http.errors import invalid_field
from services.gateway.openai.request_types import PROMPTS_MAX, CompletionRequest, TokenId
from services.gateway.openai.response_formats import CompletionFormat
from services.gateway.openai.validation import CHOICES_TOTAL_MAX, RequestOptions, check_completion
from services.gateway.tokenizing.prompt import Prompt
from services.gateway.tokenizing.tokenizer import Tokenizer

_decoder = msgspec.json.Decoder(CompletionRequest)


async def create(request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/completions: continue one or more prompts and send the completions.

    Raises:
        ApiError: when the request is refused, or fails before the response has begun.
    """
    service = request.app[SERVICE]
    body = request_body.decode(_decoder, await service.read_body(request))
    service.check_model(body.model)
    options = check_completion(body, service.config)
    _check_length(body.prompt, service.status.context_tokens_max)
    prompts_or_ids = validate_prompts(body.prompt, service.tokenizer.vocab_size)
    if len(prompts_or_ids) * options.count > CHOICES_TOTAL_MAX:
        raise invalid_field("prompt", f"prompts times n may be at most {CHOICES_TOTAL_MAX}.")
    service.admission.reserve_choices(request, len(prompts_or_ids) * options.count)
    chars = max(len(prompt) if isinstance(prompt, str) else 0 for prompt in prompts_or_ids)
    encode = service.tokenizer.encode_text
    prompts = await service.encode(
        lambda: [Prompt(encode(one) if isinstance(one, str) else one) for one in prompts_or_ids],
        chars,
        "prompt",
    )
    metadata = service.response_metadata("cmpl", options)
    echoes = _echoes(service.tokenizer, prompts_or_ids, options) if body.echo else []
    response_format = CompletionFormat(metadata, service.tokenizer, echoes)
    return await completion_service.respond(
        service, request, prompts, options, response_format, "prompt"
    )


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
    if isinstance(first, str):
        prompts: list[Any] = _converted(prompt, list[str])
    elif isinstance(first, list):
        prompts = _converted(prompt, list[list[TokenId]])
    else:
        prompts = [_converted(prompt, list[TokenId])]
    if len(prompts) > PROMPTS_MAX:
        raise invalid_field("prompt", f"at most {PROMPTS_MAX} prompts are allowed.")
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


def _echoes(
    tokenizer: Tokenizer, prompts: list[str | list[int]], options: RequestOptions
) -> list[str]:
    texts = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in prompts]
    return [text for text in texts for _ in range(options.count)]
