"""Parts and checks that all endpoints share: reading bodies, limits, encoding, reports."""

import asyncio
import dataclasses
import functools
import secrets
from collections.abc import Callable, Sequence
from typing import TypeVar

from aiohttp import web

from services.gateway.completion.open_requests import OpenRequests
from services.gateway.completion.serializer import ResponseMetadata
from services.gateway.completion.streaming import FlushList
from services.gateway.conversation.conversation import Conversation
from services.gateway.endpoints.model_names import ModelNames
from services.gateway.endpoints.request_threads import RequestThreads, Ticket
from services.gateway.http import authentication, ignored_fields, request_body, server
from services.gateway.http.admission import AdmissionControl
from services.gateway.http.authentication import Authenticator
from services.gateway.http.cors import OriginPolicy
from services.gateway.http.errors import ApiError, PromptTooLong, invalid_field, unsupported
from services.gateway.http.ignored_fields import LoggedFields
from services.gateway.links.document_client import DocumentClient
from services.gateway.links.scheduler_status import StatusBoard
from services.gateway.metrics.gateway import GatewayMetrics
from services.gateway.structured.answer_grammar import AnswerGrammars
from services.gateway.tokenizing.replay.stored_turns import StoredTurns
from services.gateway.tokenizing.replay.turns import TurnMemory
from services.gateway.tokenizing.tokenizer import Tokenizer
from services.gateway.tracing.traced_request import TRACED_REQUEST
from services.gateway.tracing.tracing import Tracing
from shared.clock import unix_seconds
from shared.configuration.settings import Config
from shared.log import Log

T = TypeVar("T")

ENCODE_S_MAX = 10.0
"""Longest time to encode the prompts of a request; a million characters take about one second."""
REQUEST_CHARS_MAX = 8_000_000
"""Characters of all prompts of a request; more could not be encoded within `ENCODE_S_MAX`."""
CHARS_PER_TOKEN = 4
"""Usual characters per token, for the estimated length of a prompt that is not encoded."""

_log = Log("gateway.requests")


@dataclasses.dataclass(slots=True)
class CompletionService:
    """Parts that all HTTP handlers of the gateway share: settings, tokenizer, limits, scheduler.

    Its methods are the steps that the endpoints of all dialects have in common.
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
    decoders: RequestThreads
    """One thread, which decodes large bodies one after another: decoding holds the interpreter
    lock, and several threads could keep it from the event loop in turns."""
    encoders: RequestThreads
    """Threads that render chat templates and encode prompts."""
    grammar_checkers: RequestThreads
    """Threads that make and check grammars: a slow one must not hold up prompts."""
    authenticator: Authenticator
    origin_policy: OriginPolicy
    admission: AdmissionControl
    """Limits on open requests and on the bytes of their bodies."""
    grammars: AnswerGrammars
    """Makes and checks the grammars that answers must match."""
    started_unix_s: int
    """Time of the gateway's start in seconds since 1970."""
    turns: TurnMemory
    """What the model wrote in the latest turns of conversations."""
    documents: DocumentClient
    """The link to the cache store, which keeps responses and turns."""
    stored_turns: StoredTurns
    """The same turns in this host's cache store, after a restart too."""
    model_names: ModelNames
    """Names of the served model that requests may use."""
    tracing: Tracing
    """Records HTTP requests for traces."""
    logged_fields: LoggedFields = dataclasses.field(default_factory=LoggedFields)
    """Ignored fields that the log has named."""

    @property
    def output_formats(self) -> dict[str, str]:
        """Names of the formats of the model's tool calls and reasoning."""
        return dataclasses.asdict(self.tokenizer.output_format)

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
        request[TRACED_REQUEST].read_s = self.tracing.recorder.clock.now()
        return body

    def check_model(self, name: str) -> None:
        """Refuse a model that is not served. Raises as `ModelNames.check`."""
        self.model_names.check(name)

    def report_ignored(self, request: web.Request, names: list[str]) -> None:
        """Report fields of a request that have no effect: in a header, the log and the metrics.

        Args:
            request: the HTTP request.
            names: paths of the fields, without the numbers of list elements.
        """
        if not names:
            return
        request[ignored_fields.IGNORED] = names
        key, fields = authentication.key_name(request), request[TRACED_REQUEST].log_fields
        for name in map(ignored_fields.shown, names[: ignored_fields.NAMES_MAX]):
            self.metrics.count_ignored(name)
            if self.logged_fields.add(name, key):
                _log.info("field_ignored", field=name, path=request.path, key=key, **fields)

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
            tokens = max(context + 1, longest // CHARS_PER_TOKEN)
            raise PromptTooLong(f"about {longest} characters", context, param, tokens)
        total = sum(lengths_chars)
        if total > REQUEST_CHARS_MAX:
            raise invalid_field(
                param,
                f"the text has {total} characters, but that of one request may have at most "
                f"{REQUEST_CHARS_MAX}: send several requests.",
            )

    def check_conversation(self, conversation: Conversation, param: str) -> None:
        """Refuse a conversation that cannot fit the context, or tools that the model cannot call.

        Args:
            conversation: the conversation.
            param: name of the request field with the messages, for errors.

        Raises:
            ApiError: 400 that names the field.
        """
        conversation.check_tools()
        self.check_lengths([conversation.text_chars], param)
        if self.tokenizer.has_special_token(conversation.template_arguments):
            problem = "an argument of the chat template has the text of a special token."
            raise invalid_field("chat_template_kwargs", problem)
        if conversation.callable_tools and not self.tokenizer.has_tool_calls:
            problem = "the format of the model's tool calls is not known: set model.tool_format."
            raise unsupported("tools", problem)

    async def encode_one(self, request: web.Request, work: Callable[[Ticket], T], param: str) -> T:
        """Return the result of one piece of work, which runs in another thread as in `encode`."""
        [result] = await self.encode(request, [work], param)
        return result

    async def check_grammars(
        self, request: web.Request, works: Sequence[Callable[[Ticket], T]], param: str
    ) -> list[T]:
        """Return the results of work on grammars, with the arguments and errors of `encode`."""
        return await self._run(self.grammar_checkers, request, works, param)

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
        return await self._run(self.encoders, request, works, param)

    async def _run(
        self,
        threads: RequestThreads,
        request: web.Request,
        works: Sequence[Callable[[Ticket], T]],
        param: str,
    ) -> list[T]:
        ticket = Ticket(authentication.tenant(request))
        try:
            async with asyncio.timeout(ENCODE_S_MAX):
                return [
                    await threads.run(ticket, functools.partial(work, ticket)) for work in works
                ]
        except TimeoutError:
            if ticket.was_waiting:
                raise ApiError(
                    429,
                    "Too many prompts or grammars are waiting to be encoded.",
                    code="queue_full",
                    retry_after_s=ENCODE_S_MAX,
                ) from None
            problem = f"encoding takes more than {ENCODE_S_MAX:.0f} s."
            raise invalid_field(param, problem) from None

    def response_metadata(self, kind: str, model: str = "") -> ResponseMetadata:
        """Return the id, time and model of a new response; the id is random.

        Args:
            kind: first part of the id, for example `chatcmpl-`.
            model: name of the model as the client gave it; "": the served name.
        """
        return ResponseMetadata(
            response_id=f"{kind}{secrets.token_hex(12)}",
            created=unix_seconds(),
            model=model or self.config.served_name,
            fingerprint=self.status.fingerprint,
        )


SERVICE = web.AppKey("service", CompletionService)
