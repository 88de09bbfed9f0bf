"""What both endpoints do once prompts are token ids: bound, submit, answer, clean up."""

import asyncio
import dataclasses
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aiohttp import web

from services.gateway.completion.completion_text import CompletionText
from services.gateway.completion.generation import Choice, Generation
from services.gateway.completion.open_requests import OpenRequests
from services.gateway.completion.response_format import (
    FinishedChoice,
    ResponseFormat,
    ResponseMetadata,
)
from services.gateway.completion.streaming import BodyCollector, EventStream, FlushList
from services.gateway.http import authentication, cache_header, errors, server
from services.gateway.http.admission import VISIT, AdmissionControl
from services.gateway.http.authentication import Authenticator
from services.gateway.http.cors import OriginPolicy
from services.gateway.http.errors import ApiError, invalid
from services.gateway.metrics.gateway import GatewayMetrics
from services.gateway.openai.validation import Options
from services.gateway.scheduler_client.scheduler_status import StatusBoard
from services.gateway.tokenizing.prompt import Prompt
from services.gateway.tokenizing.tokenizer import Tokenizer
from services.gateway.tokenizing.tool_calls import ToolCalls
from shared.clock import unix_seconds
from shared.configuration.settings import Config
from shared.messages import SubmitRequest

T = TypeVar("T")

ENCODE_S_MAX = 10.0
"""A prompt that takes longer to encode is refused: a million characters take about one second."""
DEADLINE_GRACE_S = 5.0
"""The scheduler ends a request at its deadline; the gateway does so itself this much later."""


@dataclasses.dataclass(slots=True)
class Service:
    """Everything that a handler needs."""

    config: Config
    tokenizer: Tokenizer
    status: StatusBoard
    metrics: GatewayMetrics
    requests: OpenRequests
    flush_list: FlushList
    encoders: ThreadPoolExecutor
    access: Authenticator
    origins: OriginPolicy
    door: AdmissionControl
    started_unix_s: int

    async def read(self, request: web.Request) -> bytes:
        """Let a request in and return its body.

        Raises:
            ApiError: 503 or 429, before anything is read; 400, 408, 413 or 415.
        """
        visit = self.door.enter(request)
        self.requests.check_queue()
        body = await server.read_json_body(request, self.config.gateway, visit.hold)
        visit.note_read()
        return body

    def check_open(self, choices: int) -> None:
        """Refuse when this gateway ends or holds as much as it may.

        Raises:
            ApiError: 503 or 429.
        """
        self.door.check(choices, len(self.requests))
        self.requests.check_queue()

    def check_model(self, name: str) -> None:
        """Refuse a model that is not served.

        Raises:
            ApiError: 404.
        """
        served = self.config.served_name
        if name != served:
            shown = name if len(name) <= 100 else name[:100] + "..."
            raise ApiError(
                404,
                f"The model {shown} does not exist; this server has {served}.",
                param="model",
                code="model_not_found",
            )

    async def encode(self, work: Callable[[], T], text_chars: int, param: str) -> T:
        """Run encoding work in a thread.

        Args:
            work: encodes; runs in another thread.
            text_chars: length of what it encodes.
            param: the field with the prompt, for errors.

        Raises:
            ApiError: 400; the text is surely too long, or encoding takes too long.
        """
        context = self.status.context_tokens_max
        if context and text_chars > self.tokenizer.chars_max(context):
            raise too_long(f"about {text_chars} characters", context, param)
        encoding = self.encoders.submit(work)
        try:
            waiting = asyncio.wrap_future(encoding)
            # A client that leaves does not hear of an error; asyncio would log that nobody has.
            waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
            done, _ = await asyncio.wait({waiting}, timeout=ENCODE_S_MAX)
        finally:
            # A client that left, or that has waited long enough, is not worth a thread.
            is_unbegun = encoding.cancel()
        if done:
            return waiting.result()
        if is_unbegun:
            raise ApiError(
                429,
                "Too many prompts wait to be encoded.",
                code="queue_full",
                retry_after_s=ENCODE_S_MAX,
            )
        raise invalid(f"{param}: encoding takes more than {ENCODE_S_MAX:.0f} s.", param)

    def head(self, kind: str, options: Options) -> ResponseMetadata:
        """Return what all parts of a response repeat."""
        return ResponseMetadata(
            name=f"{kind}-{secrets.token_hex(12)}",
            created=unix_seconds(),
            model=self.config.served_name,
            fingerprint=self.status.fingerprint,
            includes_usage=options.includes_usage,
        )


async def answer(
    service: Service,
    request: web.Request,
    prompts: list[Prompt],
    *,
    options: Options,
    head: ResponseMetadata,
    shape: ResponseFormat,
    prompt_param: str,
    reads_calls: bool = False,
) -> web.StreamResponse:
    """Generate completions of prompts and answer with them, streamed or whole.

    Args:
        service: everything that is shared.
        request: to be answered.
        prompts: to be continued, each `options.count` times.
        options: what was asked for.
        head: what all parts of the answer repeat.
        shape: how the answer looks.
        prompt_param: the field with the prompt, for errors.
        reads_calls: take tool calls out of the text.

    Raises:
        ApiError: nothing has been sent yet.
    """
    config = service.config.gateway
    count = len(prompts) * options.count
    stream: EventStream | None = None
    if options.is_streamed:
        stream = EventStream(
            shape, service.flush_list, config.stream_buffer_bytes_max, service.metrics, count
        )
    collector = BodyCollector(count)
    request[VISIT].release()
    follow = await service.door.others_follow()
    generation = Generation(head.name, prompts, stream or collector)
    generation.choices = _choices(service, request, generation, options, prompt_param, follow)
    for choice in generation.choices if reads_calls else ():
        choice.calls = ToolCalls()
    service.check_open(count)
    deadline = asyncio.get_running_loop().call_later(
        config.request_timeout_s + DEADLINE_GRACE_S,
        generation.fail,
        errors.timed_out("The request did not end within its deadline."),
    )
    try:
        await service.requests.submit(generation, prompt_param)
        service.metrics.prompt_tokens += generation.prompt_tokens
        if stream is not None:
            return await stream.run(
                request, generation, config.keepalive_s, has_usage=options.includes_usage
            )
        await collector.wait(generation)
        body = shape.body(_finished(collector, generation, options), generation.usage())
        headers = {cache_header.HEADER: generation.cache_line()}
        return web.Response(body=body, content_type="application/json", headers=headers)
    finally:
        deadline.cancel()
        service.requests.close(generation)


def too_long(length: str, context: int, param: str) -> ApiError:
    """Return the 400 for a prompt that leaves no room for a completion."""
    return invalid(
        f"{param}: the prompt has {length}, but prompt and completion together may have "
        f"at most {context} tokens.",
        param,
        "context_length_exceeded",
    )


def _choices(
    service: Service,
    request: web.Request,
    generation: Generation,
    options: Options,
    prompt_param: str,
    others_follow: bool,
) -> list[Choice]:
    tokenizer = service.tokenizer
    stop_ids = frozenset(tokenizer.stop_ids)
    cache_salt = authentication.cache_salt(request, options.fields.cache_salt)
    choices: list[Choice] = []
    total = len(generation.prompts) * options.count
    for prompt in generation.prompts:
        max_tokens = _max_tokens(service, prompt.ids, options, prompt_param)
        for number in range(options.count):
            order = SubmitRequest(
                request_id=f"{generation.name}:{len(choices)}",
                prompt=prompt.ids,
                sampling=options.sampling(number, tokenizer.vocab_size),
                max_tokens=max_tokens,
                stop_ids=tokenizer.stop_ids,
                deadline_s=service.config.gateway.request_timeout_s,
                cache_salt=cache_salt,
                system_tokens=prompt.system_tokens,
                cache_boundaries=prompt.cache_boundaries,
                speculation=options.speculation,
                more_requests_expected=others_follow or len(choices) + 1 < total,
            )
            text = CompletionText(
                tokenizer.detokenizer(),
                stop_ids,
                options.stops,
                has_logprobs=options.top_logprobs is not None,
            )
            choices.append(Choice(generation, len(choices), order, text))
    return choices


def _max_tokens(service: Service, prompt: list[int], options: Options, prompt_param: str) -> int:
    """Return the completion's bound for one prompt; refuse what cannot fit the context."""
    if not prompt:
        raise invalid(f"{prompt_param}: the prompt has no tokens.", prompt_param)
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
        raise invalid(
            f"{options.max_tokens_param}: {options.max_tokens} tokens after a prompt of "
            f"{len(prompt)} are more than the {context} that the context holds.",
            options.max_tokens_param,
            "context_length_exceeded",
        )
    return options.max_tokens


def _finished(
    collector: BodyCollector, generation: Generation, options: Options
) -> list[FinishedChoice]:
    return [
        FinishedChoice(
            index=choice.index,
            text="".join(collector.texts[choice.index]),
            logprobs=None if options.top_logprobs is None else collector.logprobs[choice.index],
            finish_reason=choice.finish_reason,
            calls=collector.calls[choice.index],
        )
        for choice in generation.choices
    ]
