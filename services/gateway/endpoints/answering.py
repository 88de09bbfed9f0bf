"""Answers to checked requests: encode, submit, respond, clean up. Owns no dialect."""

import asyncio
import dataclasses
import functools
from collections.abc import Callable

from aiohttp import web

from services.gateway.completion.completion_text import CompletionText
from services.gateway.completion.generation import Choice, Generation
from services.gateway.completion.serializer import Serializer
from services.gateway.completion.streaming import BodyCollector, EventStream
from services.gateway.conversation.constraint import Constraint
from services.gateway.conversation.conversation import Conversation, Tool
from services.gateway.conversation.template import (
    template_messages,
    template_tool,
    template_tools,
)
from services.gateway.endpoints.answer_length import check_logprobs, completion_tokens_max
from services.gateway.endpoints.completion_service import CHARS_PER_TOKEN, CompletionService
from services.gateway.endpoints.request_options import RequestOptions, session_key
from services.gateway.endpoints.request_threads import Ticket
from services.gateway.endpoints.span_attributes import request_attributes, result_attributes
from services.gateway.http import authentication, errors, request_body
from services.gateway.http.admission import ADMITTED
from services.gateway.http.errors import ApiError, PromptTooLong
from services.gateway.structured.answer_grammar import wishes_of
from services.gateway.tokenizing.prompt import Prompt
from services.gateway.tokenizing.replay.meaning import (
    Defaults,
    argument_defaults,
    digest_messages,
)
from services.gateway.tokenizing.replay.recorder import TurnRecorder
from services.gateway.tracing.traced_request import TRACED_REQUEST
from shared import limits
from shared.messages import Grammar, SubmitRequest, token_ids

DEADLINE_GRACE_S = 5.0
"""Time after a request's deadline at which the gateway ends it if the scheduler has not."""


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerRules:
    """What the completions of one response must be, and how their text is read."""

    tools: list[Tool] | None = None
    """The tools that the model may call in a conversation; None: the prompts are raw, and all of
    the text is the answer."""
    ends_after_call: bool = False
    """A completion ends after its first tool call."""
    grammar: Grammar | None = None
    """What every completion must match; None: any text."""
    prediction: bytes = b""
    """Packed token ids that the completions may have, as a source of drafts."""
    defaults: Defaults = dataclasses.field(default_factory=dict)
    """Defaults of the tools' arguments."""
    kept_bytes: int = 0
    """Memory of a large request that is needed until the answer's end."""


async def converse(
    service: CompletionService,
    request: web.Request,
    conversation: Conversation,
    options: RequestOptions,
    serializer: Serializer,
    prompt_param: str,
    kept_bytes: int = 0,
) -> web.StreamResponse:
    """Generate the model's answers in a conversation and send them.

    The conversation has no messages afterwards, unless its prompt is too long: an answer may take
    many minutes, and its request's memory is needed for others.

    Args:
        service: the parts that all handlers share.
        request: the HTTP request.
        conversation: the conversation, checked by `check_conversation`.
        options: the checked options of the request.
        serializer: the dialect's serializer.
        prompt_param: the request field with the messages, for errors.
        kept_bytes: memory that the dialect needs until the answer's end.

    Raises:
        ApiError: when the request fails before anything was sent.
    """
    service.admission.reserve_choices(request, options.count)
    prompt = await encode_conversation(service, request, conversation, prompt_param)
    completion_tokens_max(service.status, prompt.ids, options, options.count, prompt_param)
    conversation.messages = []
    grammar = await _answer_grammar(service, request, conversation, prompt)
    prediction = await _encode_prediction(service, request, options.prediction)
    tools = conversation.callable_tools
    if request[ADMITTED].reserved_bytes <= request_body.SMALL_BODY_BYTES:
        defaults = argument_defaults(tools)
        kept_bytes = 0
    else:
        defaults, tools_bytes = await service.encode_one(
            request, lambda _: (argument_defaults(tools), _size_bytes(tools)), "tools"
        )
        kept_bytes += tools_bytes + len(options.prediction or "")
    rules = AnswerRules(
        tools,
        not conversation.tool_choice.may_call_several,
        grammar,
        prediction,
        defaults,
        kept_bytes,
    )
    return await respond(service, request, [prompt], options, serializer, prompt_param, rules)


async def _answer_grammar(
    service: CompletionService, request: web.Request, conversation: Conversation, prompt: Prompt
) -> Grammar | None:
    """Return the checked grammar of a conversation's answer; None: any text."""
    wishes = wishes_of(conversation)
    if not service.grammars.may_constrain(wishes):
        return None
    works: list[Callable[[Ticket], Grammar | None]] = [
        functools.partial(_check, one) for one in service.grammars.checks(wishes)
    ]
    works.append(lambda _: service.grammars.answer(wishes, prompt.tail))
    try:
        return (await service.check_grammars(request, works, wishes.param))[-1]
    except ApiError:
        # The grammar is refused or could not be checked now, and the request does not demand it.
        if wishes.must_match:
            raise
        return None


async def _encode_prediction(
    service: CompletionService, request: web.Request, prediction: str | None
) -> bytes:
    """Return the packed tokens of a predicted answer, of a long one those of its beginning."""
    if not prediction:
        return b""
    text = prediction[: limits.PREDICTION_TOKENS_MAX * CHARS_PER_TOKEN]
    ids = await service.encode_one(
        request, lambda _: service.tokenizer.encode_part(text), "prediction"
    )
    return token_ids.pack(ids[: limits.PREDICTION_TOKENS_MAX])


def _size_bytes(tools: list[Tool]) -> int:
    return sum(len(request_body.to_json(template_tool(tool))) for tool in tools)


def _check(check: Callable[[], object], _ticket: Ticket) -> None:
    """Check one part of the grammar; other tenants have their turns after it."""
    check()


async def raw_grammar(
    service: CompletionService, request: web.Request, constraint: Constraint | None
) -> Grammar | None:
    """Return the grammar of completions of raw prompts; None without a constraint.

    Args:
        service: the parts that all handlers share.
        request: the HTTP request.
        constraint: what the completions must match.

    Raises:
        ApiError: 400 when the constraint cannot be matched.
    """
    if constraint is None:
        return None
    [grammar] = await service.check_grammars(
        request, [lambda _: service.grammars.raw(constraint)], constraint.param
    )
    return grammar


async def encode_conversation(
    service: CompletionService,
    request: web.Request,
    conversation: Conversation,
    prompt_param: str,
) -> Prompt:
    """Return the prompt of a conversation; its arguments and errors are those of `converse`."""
    cache = service.config.cache
    block_tokens = cache.block_tokens if cache.enabled else 0
    context = service.status.context_tokens_max
    messages, tools = conversation.messages, template_tools(conversation)
    tenant = request[ADMITTED].tenant
    digests = await _load_turns(service, request, conversation, prompt_param)

    def encode(ticket: Ticket) -> Prompt:
        texts = (message.text for message in messages)
        if service.tokenizer.surely_exceeds(texts, context):
            tokens = max(context + 1, conversation.text_chars // CHARS_PER_TOKEN)
            raise PromptTooLong(f"more than {context} tokens", context, prompt_param, tokens)
        known = digests or digest_messages(messages, conversation.tools)
        replay = service.turns.recall(tenant, messages, known)
        restored = dataclasses.replace(conversation, messages=replay.messages)
        prompt = service.tokenizer.encode_chat(
            template_messages(restored),
            tools,
            conversation.template_arguments,
            block_tokens,
            ticket.check,
            replay.turns,
        )
        return dataclasses.replace(prompt, conversation_key=known[-1])

    return await service.encode_one(request, encode, prompt_param)


async def _load_turns(
    service: CompletionService,
    request: web.Request,
    conversation: Conversation,
    prompt_param: str,
) -> list[bytes]:
    """Bring the turns of a conversation that only the cache store has into memory.

    Returns:
        The digests of the messages (`digest_messages`); [] where no store has turns.
    """
    messages = conversation.messages
    if not service.stored_turns.is_on or all(one.role != "assistant" for one in messages):
        return []
    digests = await service.encode_one(
        request, lambda _: digest_messages(messages, conversation.tools), prompt_param
    )
    tenant = request[ADMITTED].tenant
    if missing := service.turns.find_missing(tenant, messages, digests):
        service.turns.add_stored(tenant, await service.stored_turns.load(tenant, missing))
    return digests


async def respond(
    service: CompletionService,
    request: web.Request,
    prompts: list[Prompt],
    options: RequestOptions,
    serializer: Serializer,
    prompt_param: str,
    rules: AnswerRules,
) -> web.StreamResponse:
    """Generate completions of prompts and send them, as a stream or as one body.

    Args:
        service: the parts that all handlers share.
        request: the HTTP request.
        prompts: the prompts, each with `options.count` completions.
        options: the checked options of the request.
        serializer: the endpoint's serializer.
        prompt_param: the request field with the prompt, for errors.
        rules: what the completions must be.

    Raises:
        ApiError: when the request fails before anything was sent.
    """
    config = service.config.gateway
    count = len(prompts) * options.count
    sink: EventStream | BodyCollector
    if options.is_streamed:
        sink = EventStream(serializer, config, service.flush_list, service.metrics)
    else:
        sink = BodyCollector(
            serializer, count, has_logprobs=options.sampling.top_logprobs is not None
        )
    request[ADMITTED].release_body(rules.kept_bytes)
    more_expected = await service.admission.more_requests_expected()
    tenant = request[ADMITTED].tenant
    generation = Generation(serializer.metadata.response_id, prompts, sink, prompt_param, tenant)
    generation.weight = authentication.weight(request)
    generation.session = session_key(request, *options.session_names)
    generation.decode = service.tokenizer.decode_whole
    generation.traced = traced = request.get(TRACED_REQUEST)
    if traced is not None:
        traced.response_id = generation.response_id
    generation.choices = _choices(
        service, request, generation, options, serializer, rules, more_expected=more_expected
    )
    if traced is None or traced.span is None:
        return await _run(service, request, generation, sink)
    traced.attributes = request_attributes(
        generation,
        model=serializer.metadata.model,
        served_name=service.config.served_name,
        is_chat=rules.tools is not None,
        is_streamed=options.is_streamed,
    )
    try:
        return await _run(service, request, generation, sink)
    finally:
        traced.attributes |= result_attributes(generation)


async def _run(
    service: CompletionService,
    request: web.Request,
    generation: Generation,
    sink: EventStream | BodyCollector,
) -> web.StreamResponse:
    """Submit a generation and send its output until it ends, at the latest at its deadline."""
    deadline = asyncio.get_running_loop().call_later(
        service.config.gateway.request_timeout_s + DEADLINE_GRACE_S,
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


def _choices(
    service: CompletionService,
    request: web.Request,
    generation: Generation,
    options: RequestOptions,
    serializer: Serializer,
    rules: AnswerRules,
    *,
    more_expected: bool,
) -> list[Choice]:
    tokenizer, tools = service.tokenizer, rules.tools
    stop_ids = sorted({*tokenizer.stop_ids, *options.stop_ids})
    choices: list[Choice] = []
    total = len(generation.prompts) * options.count
    longest_tokens = [
        completion_tokens_max(service.status, prompt.ids, options, total, generation.prompt_param)
        for prompt in generation.prompts
    ]
    check_logprobs(options, sum(longest_tokens) * options.count)
    for prompt, max_tokens in zip(generation.prompts, longest_tokens, strict=True):
        prompt_ids = token_ids.pack(prompt.ids)
        for number in range(options.count):
            index = len(choices)
            submit_request = SubmitRequest(
                request_id=f"{generation.response_id}:{index}",
                prompt=prompt_ids,
                sampling=options.choice_sampling(number, tokenizer.vocab_size),
                tenant=generation.tenant,
                weight=generation.weight,
                priority=options.priority,
                max_tokens=max_tokens,
                stop_ids=stop_ids,
                deadline_s=service.config.gateway.request_timeout_s,
                cache_salt=authentication.cache_salt(request, options.cache_salt),
                system_tokens=prompt.system_tokens,
                cache_boundaries=prompt.cache_boundaries,
                speculation=options.speculation,
                prediction=rules.prediction,
                grammar=rules.grammar,
                more_requests_expected=more_expected or index + 1 < total,
            )
            logprobs_json = functools.partial(serializer.logprobs_json, index)
            detokenizer = tokenizer.detokenizer(is_chat=tools is not None, has_tools=bool(tools))
            text = CompletionText(detokenizer, frozenset(stop_ids), options.stops, logprobs_json)
            parser = None
            if tools is not None:
                parser = tokenizer.output_format.parser(tools, prompt.tail)
            recorder = _recorder(service, generation.tenant, prompt, rules.defaults)
            choices.append(
                Choice(
                    generation, index, submit_request, text, parser, rules.ends_after_call, recorder
                )
            )
    return choices


def _recorder(
    service: CompletionService, tenant: str, prompt: Prompt, defaults: Defaults
) -> TurnRecorder | None:
    """Return the recorder of one answer to a prompt; None if it is no conversation."""
    if prompt.place is None:
        return None
    return TurnRecorder(
        service.turns,
        tenant,
        prompt.conversation_key,
        prompt.place,
        service.tokenizer.decode_whole,
        frozenset(service.tokenizer.stop_ids),
        defaults,
    )
