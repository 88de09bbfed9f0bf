"""Prefix cache over HTTP: facts in responses, salts and cache boundaries in requests."""

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest

from shared.messages import CachedPrefix, RequestAccepted, RequestAdmitted, SubmitRequest, token_ids
from tests.gateway import tiny_tokenizer
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import Reply, finished, generated, reply_with

_TOKENIZER = tiny_tokenizer.train()
_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_HEADER = "x-lockstep-cache"
_FOUND = CachedPrefix(memory_tokens=12, stored_tokens=6, diverged_at=19, miss="diverged")
_BODIES: dict[str, dict[str, Any]] = {
    _CHAT: {"messages": [{"role": "user", "content": "one two three four five six seven"}]},
    _TEXT: {"prompt": "one two three four five six seven, how are you? I am fine, thank you."},
}
_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def _ids(text: str) -> list[int]:
    ids: list[int] = _TOKENIZER.encode(text).ids
    return ids


def _chunks(events: list[dict[str, Any] | str]) -> list[dict[str, Any]]:
    return [event for event in events if isinstance(event, dict)]


def _post(gateway: RunningGateway, path: str, **fields: Any) -> tuple[dict[str, Any], str]:
    status, body, headers = gateway.post(path, {"model": "tiny", **_BODIES[path], **fields})
    assert status == 200, body
    return body, headers[_HEADER]


@pytest.mark.parametrize("path", [_CHAT, _TEXT])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_response_reports_cached_tokens_by_tier_in_header_and_body(
    gateway: RunningGateway, path: str, is_streamed: bool
) -> None:
    """The header and the body with the usage report tokens by tier, divergence and cause."""
    gateway.scheduler.reply = reply_with(_ids("Hello"), cached=_FOUND)
    if is_streamed:
        request = {**_BODIES[path], "stream_options": {"include_usage": True}}
        events, headers = gateway.stream_with_headers(path, request)
        body, line = _chunks(events)[-1], headers[_HEADER]
        assert all("lockstep" not in chunk for chunk in _chunks(events)[:-1])
    else:
        body, line = _post(gateway, path)
    prompt = gateway.scheduler.submitted[0].prompt_tokens
    ids = token_ids.unpack(gateway.scheduler.submitted[0].prompt).tolist()
    before = _TOKENIZER.decode(ids[3:19], skip_special_tokens=False)[-48:]
    after = _TOKENIZER.decode(ids[19:35], skip_special_tokens=False)[:48]
    facts = f"memory=12; ssd=6; computed={prompt - 18}; diverged-at=19; miss=diverged"
    assert line == f"{facts}; before={json.dumps(before)}; after={json.dumps(after)}"
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 18}
    assert body["lockstep"]["cache"] == {
        "memory_tokens": 12,
        "ssd_tokens": 6,
        "computed_tokens": prompt - 18,
        "diverged_at": 19,
        "miss": "diverged",
        "text_before": before,
        "text_after": after,
    }


def test_text_around_divergence_is_one_line_of_ascii_without_semicolons(
    gateway: RunningGateway,
) -> None:
    """Line ends, characters outside ASCII and the separator of fields are escaped."""
    gateway.scheduler.reply = reply_with(_ids("Hello"), cached=CachedPrefix(diverged_at=4))
    text = 'ü; "\n漢'
    _, line = _post(gateway, _CHAT, messages=[{"role": "user", "content": text}])
    assert line.isascii()
    fields = dict(field.split("=", 1) for field in line.split("; "))
    assert text in json.loads(fields["before"]) + json.loads(fields["after"])


@pytest.mark.parametrize("path", [_CHAT, _TEXT])
def test_divergence_and_miss_cause_are_null_when_scheduler_reports_only_cached_tokens(
    gateway: RunningGateway, path: str
) -> None:
    """If the scheduler reports no divergence and no cause of a miss, the body has null for both,
    and the header omits them."""
    gateway.scheduler.reply = reply_with(_ids("Hello"), cached=CachedPrefix(memory_tokens=3))
    body, line = _post(gateway, path)
    assert re.fullmatch(r"memory=3; ssd=0; computed=\d+", line)
    assert (body["lockstep"]["cache"]["diverged_at"], body["lockstep"]["cache"]["miss"]) == (
        None,
        None,
    )


def _slow_start(admits_first: bool) -> Reply:
    """Return a reply whose first token comes after the first keep-alive."""

    def reply(request: SubmitRequest) -> Iterator[msgspec.Struct | float]:
        yield RequestAccepted(request_id=request.request_id, queued_ahead=0)
        admitted = RequestAdmitted(request_id=request.request_id, cached=_FOUND)
        if admits_first:
            yield admitted
        yield 0.6
        if not admits_first:
            yield admitted
        yield generated(request, 0, _ids("x")[:1])
        yield finished(request, 1, "stop", _FOUND)

    return reply


@pytest.mark.parametrize("path", [_CHAT, _TEXT])
def test_cache_header_of_stream_is_pending_when_sent_before_admission(
    gateway: RunningGateway, path: str
) -> None:
    """A keep-alive before the admission sends the header; the facts follow with the usage."""
    gateway.scheduler.reply = _slow_start(admits_first=False)
    request = {**_BODIES[path], "stream_options": {"include_usage": True}}
    events, headers = gateway.stream_with_headers(path, request)
    assert headers[_HEADER] == "pending"
    assert _chunks(events)[-1]["lockstep"]["cache"]["memory_tokens"] == 12
    gateway.scheduler.reply = _slow_start(admits_first=True)
    headers = gateway.stream_with_headers(path, request)[1]
    assert headers[_HEADER].startswith("memory=12; ")


def test_cache_header_reports_cached_tokens_of_first_choice(gateway: RunningGateway) -> None:
    """The header describes the first choice; the usage counts each prompt once."""

    def reply(request: SubmitRequest) -> Iterator[msgspec.Struct | float]:
        number = int(request.request_id.rpartition(":")[2])
        return reply_with(_ids("Hello"), cached=CachedPrefix(memory_tokens=number + 1))(request)

    gateway.scheduler.reply = reply
    body, line = _post(gateway, _CHAT, n=3)
    assert line.startswith("memory=1; ")
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    prompts = ["one two three", "four five six"]
    body, line = _post(gateway, _TEXT, prompt=prompts, n=2)
    assert line == f"memory=1; ssd=0; computed={len(_ids(prompts[0])) - 1}"
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 1 + 3


def test_cached_tokens_in_response_stay_those_of_first_of_two_admissions(
    gateway: RunningGateway,
) -> None:
    """After a restart of the scheduler a request is admitted again and finds its generated tokens;
    they do not count as cached."""

    def reply(request: SubmitRequest) -> Iterator[msgspec.Struct | float]:
        for cached in (_FOUND, CachedPrefix(memory_tokens=1_000)):
            yield RequestAdmitted(request_id=request.request_id, cached=cached)
        yield generated(request, 0, _ids("x")[:1])
        yield finished(request, 1, "stop", CachedPrefix(memory_tokens=1_000))

    gateway.scheduler.reply = reply
    body, line = _post(gateway, _CHAT)
    assert line.startswith("memory=12; ssd=6; ")
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 18


def test_openai_client_parses_response_with_cache_header_and_fields(
    gateway: RunningGateway,
) -> None:
    """OpenAI's client accepts the header and the fields, streamed or not."""
    gateway.scheduler.reply = reply_with([*_ids("Hello"), 2], cached=_FOUND)
    messages: list[Any] = _BODIES[_CHAT]["messages"]
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(model="tiny", messages=messages)
        assert raw.headers["x-lockstep-cache"].startswith("memory=12; ssd=6; ")
        response = raw.parse()
        assert response.usage is not None
        assert response.usage.prompt_tokens_details is not None
        assert response.usage.prompt_tokens_details.cached_tokens == 18
        assert (response.model_extra or {})["lockstep"]["cache"]["ssd_tokens"] == 6
        chunks = list(
            client.chat.completions.create(
                model="tiny",
                messages=messages,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert (chunks[-1].model_extra or {})["lockstep"]["cache"]["miss"] == "diverged"
        with client.chat.completions.stream(
            model="tiny", messages=messages, stream_options={"include_usage": True}
        ) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.content == "Hello"
        text = client.completions.create(model="tiny", prompt="x")
        assert text.usage is not None


@pytest.mark.parametrize("path", [_CHAT, _TEXT])
@pytest.mark.parametrize("salt", ["team/1", "a\x00b\nc", "漢" * 256, ""])
def test_cache_salt_of_request_reaches_scheduler_unchanged(
    gateway: RunningGateway, path: str, salt: str
) -> None:
    """B42: a salt of any characters reaches the scheduler unchanged."""
    _post(gateway, path, cache_salt=salt)
    assert gateway.scheduler.submitted[0].cache_salt == salt


@pytest.mark.parametrize("path", [_CHAT, _TEXT])
def test_scheduler_gets_empty_cache_salt_when_request_has_none(
    gateway: RunningGateway, path: str
) -> None:
    """A salt that is left out or null is empty."""
    _post(gateway, path)
    _post(gateway, path, cache_salt=None)
    assert [request.cache_salt for request in gateway.scheduler.submitted] == ["", ""]


@pytest.mark.parametrize("path", [_CHAT, _TEXT])
@pytest.mark.parametrize("salt", [1, True, ["x"], {}, "x" * 257, "x" * 2**20])
def test_gateway_answers_400_when_cache_salt_is_invalid(
    gateway: RunningGateway, path: str, salt: Any
) -> None:
    """B42: status 400 that names the field; nothing reaches the scheduler."""
    status, body, _ = gateway.post(path, {"model": "tiny", **_BODIES[path], "cache_salt": salt})
    assert (status, body["error"]["param"]) == (400, "cache_salt")
    assert gateway.scheduler.submitted == []


def test_scheduler_gets_exact_token_positions_where_user_message_begins_and_ends(
    gateway: RunningGateway,
) -> None:
    """The numbers of system tokens and the cache boundaries of a conversation are exact to the
    token."""
    system = {"role": "system", "content": "The scheduler decides, every rank obeys."}
    user = {"role": "user", "content": "Hello, how are you?"}
    body = {"model": "tiny", "messages": [system, user], "tools": _TOOLS, "n": 2}
    assert gateway.post(_CHAT, body)[0] == 200
    for request in gateway.scheduler.submitted:
        prompt = token_ids.unpack(request.prompt).tolist()
        text = _TOKENIZER.decode(prompt, skip_special_tokens=False)
        before_user, _, rest = text.partition("Hello, how are you?")
        end = len(_ids(before_user + "Hello, how are you?<|im_end|>\n"))
        assert rest == "<|im_end|>\n<|im_start|>assistant\n"
        assert request.system_tokens == len(_ids(before_user))
        assert request.cache_boundaries == [len(_ids(before_user)), end]
        assert end < request.prompt_tokens


def test_raw_prompt_or_short_chat_is_submitted_without_cache_boundaries(
    gateway: RunningGateway,
) -> None:
    """A raw prompt has no known structure; a prompt below one block cannot be cached."""
    _post(gateway, _TEXT, prompt="<|im_start|>system\nHello there<|im_end|>\n" * 8)
    _post(gateway, _CHAT, messages=[{"role": "user", "content": "Hi"}])
    text, short = gateway.scheduler.submitted
    assert text.prompt_tokens >= 32 > short.prompt_tokens
    assert (text.system_tokens, text.cache_boundaries) == (0, [])
    assert (short.system_tokens, short.cache_boundaries) == (0, [])
