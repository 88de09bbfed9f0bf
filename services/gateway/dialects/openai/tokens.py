"""Endpoints POST /tokenize and /detokenize, as in vLLM. Owns their request types."""

import dataclasses
import functools
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from services.gateway.conversation.conversation import Conversation
from services.gateway.dialects.openai import chat, request_types, validation
from services.gateway.endpoints import answering
from services.gateway.endpoints.completion_service import SERVICE, CompletionService
from services.gateway.endpoints.request_threads import Ticket
from services.gateway.http.errors import PromptTooLong, invalid_field
from services.gateway.http.ignored_fields import LenientDecoder, RefusedField
from services.gateway.http.json_response import json_response

TOKENS_MAX = 1_000_000
"""Most token ids of one request or answer."""

_CHANGES_PROMPT = "prompts are always those of the completion endpoints: remove it."
REFUSED_FIELDS = {
    "add_special_tokens": RefusedField(_CHANGES_PROMPT, (True,)),
    "add_generation_prompt": RefusedField(_CHANGES_PROMPT, (True,)),
    "continue_final_message": RefusedField(_CHANGES_PROMPT, (False,)),
}
"""Fields of /tokenize whose neglect would give other tokens, with the remedy."""


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /tokenize: a text or a conversation."""

    model: str | None = None
    """Name of the served model or an alias. Default: the served model."""
    prompt: str | None = None
    """The text, encoded as the prompt of /v1/completions. Give it or `messages`."""
    messages: (
        Annotated[
            list[request_types.ChatMessage],
            Meta(min_length=1, max_length=request_types.MESSAGES_MAX),
        ]
        | None
    ) = None
    """The conversation, encoded as that of /v1/chat/completions."""
    tools: Annotated[list[request_types.Tool], Meta(max_length=request_types.TOOLS_MAX)] | None = (
        None
    )
    """Tools of the conversation. Default: no tools."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments for the model's chat template. Default: no arguments."""
    return_token_strs: bool | None = None
    """True: return the text of each token as well. Default: false."""


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /detokenize: token ids."""

    model: str | None = None
    """Name of the served model or an alias. Default: the served model."""
    tokens: Annotated[list[request_types.TokenId], Meta(max_length=TOKENS_MAX)]
    """The token ids, at most 1,000,000."""


class TokenIds(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Answer of /tokenize."""

    count: int
    """Number of tokens."""
    max_model_len: int | None
    """Longest prompt plus completion in tokens; null if it is not known yet."""
    tokens: list[int]
    """The token ids."""
    token_strs: list[str] | UnsetType = UNSET
    """The text of each token, if asked for. Incomplete characters are U+FFFD."""


class TokenText(Struct, forbid_unknown_fields=True):
    """Answer of /detokenize."""

    prompt: str
    """The text, special tokens included."""


_tokenize = LenientDecoder(TokenizeRequest, REFUSED_FIELDS)
_detokenize = LenientDecoder(DetokenizeRequest, {})


@dataclasses.dataclass(frozen=True, slots=True)
class _Parsed:
    """A checked request to encode a text or a conversation."""

    body: TokenizeRequest
    conversation: Conversation | None
    ignored: list[str]
    """Fields without effect."""


async def tokenize(request: web.Request) -> web.Response:
    """Answer POST /tokenize with the token ids of a text or of a conversation's prompt.

    Raises:
        ApiError: when the request is refused.
    """
    service = request.app[SERVICE]
    parsed = await service.parse(request, functools.partial(_parse, service))
    service.report_ignored(request, parsed.ignored)
    if parsed.conversation is not None:
        prompt = await answering.encode_conversation(
            service, request, parsed.conversation, "messages"
        )
        ids = list(prompt.ids)
    else:
        text = parsed.body.prompt or ""
        ids = await service.encode_one(request, lambda _: _encode(service, text), "prompt")
    has_texts = bool(parsed.body.return_token_strs)
    work = functools.partial(_answer, service, ids, has_texts=has_texts)
    return json_response(await service.encode_one(request, lambda _: work(), "prompt"))


async def detokenize(request: web.Request) -> web.Response:
    """Answer POST /detokenize with the text of token ids, special tokens included.

    Raises:
        ApiError: when the request is refused.
    """
    service = request.app[SERVICE]
    body, ignored = await service.parse(request, functools.partial(_parse_ids, service))
    service.report_ignored(request, ignored)

    def decode(_ticket: Ticket) -> bytes:
        return msgspec.json.encode(TokenText(service.tokenizer.decode_whole(body.tokens)))

    return json_response(await service.encode_one(request, decode, "tokens"))


def _parse(service: CompletionService, data: bytes) -> _Parsed:
    """Decode and check a body. Thread-safe.

    Raises:
        ApiError: when the request is refused.
    """
    body, ignored = _tokenize.decode(data)
    _check_model(service, body.model)
    if body.messages is None:
        if body.prompt is None:
            raise invalid_field("prompt", "give a prompt or messages.")
        service.check_lengths([len(body.prompt)], "prompt")
        return _Parsed(body, None, ignored)
    if body.prompt is not None:
        raise invalid_field("prompt", "give either a prompt or messages.")
    validation.check_template_arguments(body.chat_template_kwargs or {}, "chat_template_kwargs")
    asked = request_types.ChatCompletionRequest(
        model="",
        messages=body.messages,
        tools=body.tools,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    conversation = chat.read_conversation(asked, ignored)
    service.check_conversation(conversation, "messages")
    return _Parsed(body, conversation, ignored)


def _parse_ids(service: CompletionService, data: bytes) -> tuple[DetokenizeRequest, list[str]]:
    """Decode and check a body. Thread-safe.

    Raises:
        ApiError: when the request is refused.
    """
    body, ignored = _detokenize.decode(data)
    _check_model(service, body.model)
    size = service.tokenizer.vocab_size
    if max(body.tokens, default=0) >= size:
        problem = f"the model has no token {max(body.tokens)}, only 0 to {size - 1}."
        raise invalid_field("tokens", problem)
    return body, ignored


def _check_model(service: CompletionService, name: str | None) -> None:
    if name is not None:
        service.check_model(name)


def _encode(service: CompletionService, text: str) -> list[int]:
    """Return the token ids of a text. Thread-safe.

    Raises:
        ApiError: 400 when it has more tokens than the context, or than an answer may have.
    """
    context = service.status.context_tokens_max
    if service.tokenizer.surely_exceeds([text], context):
        raise PromptTooLong(f"more than {context} tokens", context, "prompt")
    ids = service.tokenizer.encode_text(text)
    if len(ids) > TOKENS_MAX:
        problem = f"it has {len(ids)} tokens, but at most {TOKENS_MAX} are sent: send a part of it."
        raise invalid_field("prompt", problem)
    return ids


def _answer(service: CompletionService, ids: list[int], *, has_texts: bool) -> bytes:
    """Return the answer with these token ids as JSON. Thread-safe."""
    context = service.status.context_tokens_max or None
    answer = TokenIds(count=len(ids), max_model_len=context, tokens=ids)
    if has_texts:
        answer.token_strs = _texts(service, ids)
    return msgspec.json.encode(answer)


def _texts(service: CompletionService, ids: list[int]) -> list[str]:
    known: dict[int, str] = {}
    for token in ids:
        if token not in known:
            known[token] = service.tokenizer.token_bytes(token).decode(errors="replace")
    return [known[token] for token in ids]
