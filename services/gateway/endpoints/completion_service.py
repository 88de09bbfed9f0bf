"""Shared work of both completion endpoints: read, encode, submit, respond, clean up."""

import asyncio
import dataclasses
import functools
import secrets
from collections.abc import Callable, Sequence
from typing import TypeVar

from aiohttp import web

from services.gateway.completion.completion_text import CompletionText
from services.gateway.completion.generation import Choice, Generation
from services.gateway.completion.open_requests import OpenRequests
from services.gateway.completion.response_format import ResponseFormat, ResponseMetadata
from services.gateway.completion.streaming import BodyCollector, EventStream, FlushList
from services.gateway.endpoints.fair_threads import FairThreads, Ticket
from services.gateway.http import authentication, errors, request_body, server
from services.gateway.http.admission import ADMITTED, AdmissionControl
from services.gateway.http.authentication import Authenticator
from services.gateway.http.cors import OriginPolicy
from services.gateway.http.errors import ApiError, invalid_field
from services.gateway.metrics.gateway import GatewayMetrics
from services.gateway.openai.validation import RequestOptions
from services.gateway.scheduler_client.scheduler_status import StatusBoard
from services.gateway.tokenizing.prompt import Prompt
from services.gateway.tokenizing.tokenizer import Tokenizer
from services.gateway.tokenizing.tool_calls import ToolCallParser
from shared.clock import unix_seconds
from shared.configuration.settings import Config
from shared.messages import SubmitRequest, token_ids

T = TypeVar("T")

ENCODE_S_MAX = 10.0
"""Longest time to encode the prompts of a request; a million characters take about one second."""
REQUEST_CHARS_MAX = 8_000_000
"""Characters of all prompts of a request; more could not be encoded within `ENCODE_S_MAX`."""
LOGPROB_ENTRIES_MAX = 1_000_000
"""Log probabilities in an answer that is not streamed. Each takes about 70 bytes of JSON, which is
kept until the answer is complete."""
DEADLINE_GRACE_S = 5.0
"""Time after a request's deadline at which the gateway ends it if the scheduler has not."""


@dataclasses.dataclass(slots=True)
class CompletionService:
    """Parts that all HTTP handlers of the gateway share: settings, tokenizer, limits, scheduler.

    Its methods are the steps that both completion endpoints have in common.
    """

    config: Config
    tokenizer: Tokenizer
    status: StatusBoard
    """The scheduler's last report, which decides whether new requests are served."""
    metrics: GatewayMetrics
    open_requests: OpenRequests
    """Sends completions to the scheduler and passes their tokens to the responses."""
    flush_list: FlushList
    """Streams that have collected events since the last write."""
    decoders: FairThreads
    """One thread, which decodes large bodies one after another: decoding holds the interpreter
    lock, and several threads could keep it from the event loop in turns."""
    encoders: FairThreads
    """Threads that render chat templates and encode prompts."""
    authenticator: Authenticator
    origin_policy: OriginPolicy
    admission: AdmissionControl
    """Limits on open requests and on the bytes of their bodies."""
    started_unix_s: int
    """Time of the gateway's start in seconds since 1970."""

    async def read_body(self, request: web.Request) -> bytes:
        """Admit a request, which counts it as open, then read and return its body.

        Returns:
            The JSON body as bytes, not parsed.

        Raises:
            ApiError: 503 or 429 before the body is read, when the gateway shuts down or is full;
                400, 408, 413 or 415 for the body.
        """
        admitted = self.admission.admit(request)
        self.open_requests.check_queue(admitted.tenant)
        body = await server.read_json_body(request, self.config.gateway, admitted.reserve_body)
        admitted.mark_read()
        return body

    def check_model(self, name: str) -> None:
        """Refuse a model that is not served.

        Raises:
            ApiError: 404 when the name is not the served model's.
        """
        served = self.config.served_name
        if name != served:
            shown = name if len(name) <= 100 else name[:100] + "..."
            raise ApiError(
                404,
                f"The model {shown} does not exist; this server serves {served}.",
                param="model",
                code="model_not_found",
            )

    async def parse(self, request: web.Request, work: Callable[[bytes], T]) -> T:
        """Admit a request, read its body, and return what `work` makes of it.

        Args:
            request: the HTTP request.
            work: decodes and checks the body. For a large body it runs in another thread, so it
                must be thread-safe.

        Raises:
            ApiError: as `read_body` and `work` do; 429 when too many bodies wait to be decoded.
        """
        body = await self.read_body(request)
        if len(body) <= request_body.SMALL_BODY_BYTES:
            return work(body)
        ticket = Ticket(authentication.tenant(request))
        return await self.decoders.run(ticket, lambda: work(body))

    def check_lengths(self, lengths_chars: Sequence[int], param: str) -> None:
        """Refuse prompts that cannot fit the context, or are too long together, unencoded.

        Args:
            lengths_chars: characters of each text to encode.
            param: name of the request field that holds the prompts, for errors.

        Raises:
            ApiError: 400 when one of them, or all together, are too long.
        """
        context = self.status.context_tokens_max
        longest = max(lengths_chars, default=0)
        if context and longest > self.tokenizer.chars_max(context):
            raise too_long(f"about {longest} characters", context, param)
        total = sum(lengths_chars)
        if total > REQUEST_CHARS_MAX:
            raise invalid_field(
                param,
                f"the text has {total} characters, but that of one request may have at most "
                f"{REQUEST_CHARS_MAX}: send several requests.",
            )

    async def encode(
        self, request: web.Request, works: Sequence[Callable[[Ticket], T]], param: str
    ) -> list[T]:
        """Run the encoding of prompts in other threads, one after another; return the results.

        Other tenants have their turns in between. Nothing more is encoded for a client that has
        gone, or after an error.

        Args:
            request: the HTTP request.
            works: each encodes some of the prompts; must be thread-safe.
            param: name of the request field that holds the prompts, for errors.

        Raises:
            ApiError: 400 when encoding takes too long; 429 when no thread was free in time.
        """
        ticket = Ticket(authentication.tenant(request))
        try:
            async with asyncio.timeout(ENCODE_S_MAX):
                return [
                    await self.encoders.run(ticket, functools.partial(work, ticket))
                    for work in works
                ]
        except TimeoutError:
            if ticket.is_waiting:
                raise ApiError(
                    429,
                    "Too many prompts are waiting to be encoded.",
                    code="queue_full",
                    retry_after_s=ENCODE_S_MAX,
                ) from None
            problem = f"encoding takes more than {ENCODE_S_MAX:.0f} s."
            raise invalid_field(param, problem) from None

    def response_metadata(self, kind: str, options: RequestOptions) -> ResponseMetadata:
        """Return the id, time, model and options of a new response; the id is random.

        Args:
            kind: first part of the id, `chatcmpl` or `cmpl`.
            options: the checked options of the request.
        """
        return ResponseMetadata(
            name=f"{kind}-{secrets.token_hex(12)}",
            created=unix_seconds(),
            model=self.config.served_name,
            fingerprint=self.status.fingerprint,
            includes_usage=options.includes_usage,
        )


SERVICE = web.AppKey("service", CompletionService)


async def respond(
    service: CompletionService,
    request: web.Request,
    prompts: list[Prompt],
    options: RequestOptions,
    response_format: ResponseFormat,
    prompt_param: str,
    *,
    parses_tool_calls: bool = False,
) -> web.StreamResponse:
    """Generate completions of prompts and send them, as a stream or as one body.

    Args:
        service: the parts that all handlers share.
        request: the HTTP request.
        prompts: the prompts, each with `options.count` completions.
        options: the checked options of the request.
        response_format: the endpoint's serializer.
        prompt_param: the request field with the prompt, for errors.
        parses_tool_calls: find tool calls in the text.

    Raises:
        ApiError: when the request fails before anything was sent.
    """
    config = service.config.gateway
    count = len(prompts) * options.count
    sink: EventStream | BodyCollector
    if options.is_streamed:
        sink = EventStream(response_format, count, config, service.flush_list, service.metrics)
    else:
        sink = BodyCollector(response_format, count, has_logprobs=options.top_logprobs is not None)
    request[ADMITTED].release_body()
    more_expected = await service.admission.more_requests_expected()
    tenant = request[ADMITTED].tenant
    generation = Generation(response_format.metadata.name, prompts, sink, prompt_param, tenant)
    generation.weight = authentication.weight(request)
    cache_salt = authentication.cache_salt(request, options.fields.cache_salt)
    generation.choices = _choices(
        service, generation, options, response_format, cache_salt, more_expected
    )
    for choice in generation.choices if parses_tool_calls else ():
        choice.tool_calls = ToolCallParser()
    deadline = asyncio.get_running_loop().call_later(
        config.request_timeout_s + DEADLINE_GRACE_S,
        generation.fail,
        errors.timed_out("The request did not end within its deadline."),
    )
    try:
        await service.open_requests.submit(generation)
        service.metrics.prompt_tokens += generation.prompt_tokens
        return await sink.run(request, generation)
    finally:
        deadline.cancel()
        service.open_requests.close(generation)


def too_long(length: str, context: int, param: str) -> ApiError:
    """Return the 400 for a prompt that leaves no room for a completion in the context.

    Args:
        length: text that states the prompt's length, for example "5000 tokens".
        context: most tokens that prompt and completion may have together.
        param: name of the request field that holds the prompt.
    """
    return invalid_field(
        param,
        f"the prompt has {length}, but prompt and completion together may have at most {context} "
        "tokens.",
        "context_length_exceeded",
    )


def _choices(
    service: CompletionService,
    generation: Generation,
    options: RequestOptions,
    response_format: ResponseFormat,
    cache_salt: str,
    more_expected: bool,
) -> list[Choice]:
    tokenizer = service.tokenizer
    stop_ids = frozenset(tokenizer.stop_ids)
    choices: list[Choice] = []
    total = len(generation.prompts) * options.count
    longest_tokens = [
        _max_tokens(service, prompt.ids, options, generation.prompt_param)
        for prompt in generation.prompts
    ]
    _check_logprobs(options, sum(longest_tokens) * options.count)
    for prompt, max_tokens in zip(generation.prompts, longest_tokens, strict=True):
        prompt_ids = token_ids.pack(prompt.ids)
        for number in range(options.count):
            submit_request = SubmitRequest(
                request_id=f"{generation.name}:{len(choices)}",
                prompt=prompt_ids,
                sampling=options.sampling(number, tokenizer.vocab_size),
                tenant=generation.tenant,
                weight=generation.weight,
                max_tokens=max_tokens,
                stop_ids=tokenizer.stop_ids,
                deadline_s=service.config.gateway.request_timeout_s,
                cache_salt=cache_salt,
                system_tokens=prompt.system_tokens,
                cache_boundaries=prompt.cache_boundaries,
                speculation=options.speculation,
                more_requests_expected=more_expected or len(choices) + 1 < total,
            )
            logprobs_json = functools.partial(response_format.logprobs_json, len(choices))
            text = CompletionText(tokenizer.detokenizer(), stop_ids, options.stops, logprobs_json)
            choices.append(Choice(generation, len(choices), submit_request, text))
    return choices


def _check_logprobs(options: RequestOptions, tokens_max: int) -> None:
    """Refuse a request whose whole answer would have too many log probabilities.

    A stream may have any number, because its events are not kept.

    Args:
        options: the checked options of the request.
        tokens_max: most tokens of all its completions together.

    Raises:
        ApiError: 400 when it would have more than `LOGPROB_ENTRIES_MAX`.
    """
    if options.top_logprobs is None or options.is_streamed:
        return
    per_token = 1 + options.top_logprobs
    if tokens_max * per_token > LOGPROB_ENTRIES_MAX:
        raise invalid_field(
            "logprobs",
            f"the answer could have {tokens_max} tokens with {per_token} log probabilities each, "
            f"which is {tokens_max * per_token}, but an answer that is not streamed may have at "
            f"most {LOGPROB_ENTRIES_MAX}. Lower {options.max_tokens_param}, n or the number of "
            "alternatives, or set stream.",
            "invalid_value",
        )


def _max_tokens(
    service: CompletionService, prompt: Sequence[int], options: RequestOptions, prompt_param: str
) -> int:
    """Return the longest completion of one prompt in tokens.

    Raises:
        ApiError: 400 when prompt and completion do not fit the context.
    """
    if not prompt:
        raise invalid_field(prompt_param, "the prompt has no tokens.")
    default = service.config.gateway.default_max_tokens
    context = service.status.context_tokens_max
    if not context:
        return options.max_tokens or default
    room = context - len(prompt)
    if room < 1:
        raise too_long(f"{len(prompt)} tokens", context, prompt_param)
    if options.max_tokens is None:
        return min(default, room)
    if options.max_tokens > room:
        raise invalid_field(
            options.max_tokens_param,
            f"{options.max_tokens} tokens after a prompt of {len(prompt)} exceed the context of "
            f"{context} tokens.",
            "context_length_exceeded",
        )
    return options.max_tokens
