"""Endpoint POST /v1/completions. Owns checking prompts, which are texts or token ids."""

import array
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import msgspec
from aiohttp import web

from services.gateway.conversation.constraint import Constraint
from services.gateway.dialects.openai import field_rules
from services.gateway.dialects.openai.best_of import BestOfFormat
from services.gateway.dialects.openai.constraint_fields import read_constraint
from services.gateway.dialects.openai.request_types import PROMPTS_MAX, CompletionRequest, TokenId
from services.gateway.dialects.openai.serializers import TextCompletionSerializer
from services.gateway.dialects.openai.validation import CHOICES_TOTAL_MAX, check_completion
from services.gateway.endpoints import answering
from services.gateway.endpoints.completion_service import SERVICE, CompletionService
from services.gateway.endpoints.request_options import RequestOptions
from services.gateway.endpoints.request_threads import Ticket
from services.gateway.http import request_body
from services.gateway.http.errors import PromptTooLong, invalid_field, unsupported
from services.gateway.http.ignored_fields import LenientDecoder, set_fields
from services.gateway.tokenizing.prompt import Prompt

BATCH_LENGTH_MAX = 65_536
"""Characters or tokens of several prompts that are encoded without a turn of another tenant; they
take less than 0.1 s."""
ECHO_LENGTH_MAX = 2_000_000
"""Characters or tokens of all prompts in an answer with `echo`, once per choice: writing their JSON
holds up the event loop for up to 20 ms."""

_decoder = LenientDecoder(CompletionRequest, field_rules.REFUSED_FIELDS)


async def create(request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/completions: continue one or more prompts and send the completions.

    Raises:
        ApiError: when the request is refused, or fails before the response has begun.
    """
    service = request.app[SERVICE]
    parsed = await service.parse(request, functools.partial(_parse, service))
    service.report_ignored(request, parsed.ignored)
    service.admission.reserve_choices(request, len(parsed.prompts) * parsed.options.count)
    encode = functools.partial(_encode, service, parsed)
    works = [functools.partial(encode, batch) for batch in _batches(parsed.prompts)]
    batches = await service.encode(request, works, "prompt")
    encoded = [one for batch in batches for one in batch]
    echoes = [echo for _, echo in encoded for _ in range(parsed.options.count)]
    serializer = _serializer(service, parsed, echoes if parsed.echoes else [])
    prompts = [prompt for prompt, _ in encoded]
    grammar = await answering.raw_grammar(service, request, parsed.constraint)
    rules = answering.AnswerRules(grammar=grammar)
    return await answering.respond(
        service, request, prompts, parsed.options, serializer, "prompt", rules
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Parsed:
    """A checked completions request."""

    prompts: list[str | list[int]]
    options: RequestOptions
    echoes: bool
    """Each text begins with its prompt."""
    ignored: list[str]
    """Fields without effect."""
    constraint: Constraint | None
    """What the text must match; None: any text."""
    suffix: str
    """Text after the completions; "": none."""
    shown: int
    """Choices per prompt that the answer shows: the best."""
    shows_logprobs: bool
    """The answer has log probabilities."""


def _parse(service: CompletionService, data: bytes) -> _Parsed:
    """Decode and check a body. Thread-safe.

    Raises:
        ApiError: when the request is refused.
    """
    body, ignored = _decoder.decode(data)
    service.check_model(body.model)
    options = check_completion(body, service.config)
    shown, shows_logprobs = options.count, body.logprobs is not None
    if body.best_of is not None and body.best_of > shown:
        options = _with_all_choices(options, body.best_of)
    context = service.status.context_tokens_max
    _check_length(body.prompt, context)
    prompts = validate_prompts(body.prompt, service.tokenizer.vocab_size)
    if len(prompts) * options.count > CHOICES_TOTAL_MAX:
        raise invalid_field("prompt", f"prompts times n may be at most {CHOICES_TOTAL_MAX}.")
    for prompt in prompts:
        if context and isinstance(prompt, list) and len(prompt) >= context:
            raise PromptTooLong(f"{len(prompt)} tokens", context, "prompt", len(prompt))
    lengths_chars = [len(prompt) for prompt in prompts if isinstance(prompt, str)]
    service.check_lengths(lengths_chars, "prompt")
    if body.suffix:
        service.check_lengths([len(body.suffix)], "suffix")
        options = _with_infill(service, options)
    if body.echo and sum(map(len, prompts)) * options.count > ECHO_LENGTH_MAX:
        raise invalid_field(
            "echo",
            f"all echoed prompts together may have at most {ECHO_LENGTH_MAX} characters or tokens.",
        )
    ignored += set_fields(body, field_rules.WITHOUT_EFFECT)
    return _Parsed(
        prompts=prompts,
        options=options,
        echoes=bool(body.echo),
        ignored=ignored,
        constraint=read_constraint(body),
        suffix=body.suffix or "",
        shown=shown,
        shows_logprobs=shows_logprobs,
    )


def _with_all_choices(options: RequestOptions, best_of: int) -> RequestOptions:
    """Return options that generate the choices among which the best are found."""
    sampling = options.sampling
    if sampling.top_logprobs is None:
        sampling = msgspec.structs.replace(sampling, top_logprobs=0)
    return dataclasses.replace(options, count=best_of, sampling=sampling)


def _with_infill(service: CompletionService, options: RequestOptions) -> RequestOptions:
    """Return options that end a completion in the middle of a text.

    Raises:
        ApiError: 400 when the model cannot fill in the middle.
    """
    infill = service.tokenizer.infill
    if infill is None:
        raise unsupported(
            "suffix",
            "the model's tokenizer has no markers for filling in the middle, such as "
            "<|fim_prefix|>.",
        )
    return dataclasses.replace(options, stop_ids=infill.stop_ids)


def _serializer(
    service: CompletionService, parsed: _Parsed, echoes: list[str]
) -> TextCompletionSerializer:
    metadata = service.response_metadata("cmpl-", parsed.options.model)
    if parsed.options.count > parsed.shown:
        return BestOfFormat(
            metadata,
            service.tokenizer,
            echoes,
            shown=parsed.shown,
            sampled=parsed.options.count,
            shows_logprobs=parsed.shows_logprobs,
        )
    return TextCompletionSerializer(
        metadata, service.tokenizer, echoes, includes_usage=parsed.options.includes_usage
    )


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
    service: CompletionService, parsed: _Parsed, batch: list[str | list[int]], ticket: Ticket
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
        texts = [one for one in (prompt, parsed.suffix) if isinstance(one, str)]
        if tokenizer.surely_exceeds(texts, context):
            raise PromptTooLong(f"more than {context} tokens", context, "prompt")
        if isinstance(prompt, str):
            text = prompt
            encode = tokenizer.encode_part if parsed.suffix else tokenizer.encode_text
            ids = encode(prompt)
        else:
            text, ids = tokenizer.decode(prompt) if parsed.echoes else "", prompt
        if parsed.suffix and tokenizer.infill is not None:
            after = tokenizer.encode_part(parsed.suffix)
            ids = tokenizer.infill.arrange(tokenizer.encode_text(""), ids, after)
        if context and len(ids) >= context:
            raise PromptTooLong(f"{len(ids)} tokens", context, "prompt", len(ids))
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
        raise PromptTooLong(f"{len(prompt)} tokens", context, "prompt", len(prompt))


def _converted(value: Any, kind: Any) -> list[Any]:
    converted: list[Any] = request_body.convert(value, kind, "prompt")
    return converted
