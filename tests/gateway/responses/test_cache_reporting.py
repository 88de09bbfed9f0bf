"""What clients learn of the prefix cache, and what the scheduler learns of prompts for it."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest

from shared.messages import CachedPrefix, RequestAccepted, RequestAdmitted, SubmitRequest
from tests.gateway import tiny_tokenizer
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import Reply, finished, generated, say

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


def _whole(gateway: RunningGateway, path: str, **fields: Any) -> tuple[dict[str, Any], str]:
    status, body, headers = gateway.post(path, {"model": "tiny", **_BODIES[path], **fields})
    assert status == 200, body
    return body, headers[_HEADER]


@pytest.mark.parametrize("path", [_CHAT, _TEXT])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_every_answer_says_what_was_cached(
    gateway: RunningGateway, path: str, is_streamed: bool
) -> None:
    """By tier, with the divergence and the cause: in the header, and in the body with the usage."""
    gateway.scheduler.reply = say(_ids("Hello"), cached=_FOUND)
    if is_streamed:
        asked = {**_BODIES[path], "stream_options": {"include_usage": True}}
        events, headers = gateway.stream_with_headers(path, asked)
        body, line = _chunks(events)[-1], headers[_HEADER]
        assert all("lockstep" not in chunk for chunk in _chunks(events)[:-1])
    else:
        body, line = _whole(gateway, path)
    prompt = len(gateway.scheduler.orders[0].prompt)
    assert line == f"memory=12; ssd=6; computed={prompt - 18}; diverged-at=19; miss=diverged"
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 18}
    assert body["lockstep"]["cache"] == {
        "memory_tokens": 12,
        "ssd_tokens": 6,
        "computed_tokens": prompt - 18,
        "diverged_at": 19,
        "miss": "diverged",
    }


@pytest.mark.parametrize("path", [_CHAT, _TEXT])
def test_only_what_applies_is_said(gateway: RunningGateway, path: str) -> None:
    """Nothing diverged, nothing is missing: no such fields."""
    gateway.scheduler.reply = say(_ids("Hello"), cached=CachedPrefix(memory_tokens=3))
    body, line = _whole(gateway, path)
    assert re.fullmatch(r"memory=3; ssd=0; computed=\d+", line)
    assert (body["lockstep"]["cache"]["diverged_at"], body["lockstep"]["cache"]["miss"]) == (
        None,
        None,
    )


def _late(admits_first: bool) -> Reply:
    """Return a script whose first token comes after the first keep-alive."""

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
def test_a_stream_that_begins_before_its_admission_says_pending(
    gateway: RunningGateway, path: str
) -> None:
    """The header goes out with the first keep-alive; the facts stand at the end of the stream."""
    gateway.scheduler.reply = _late(admits_first=False)
    asked = {**_BODIES[path], "stream_options": {"include_usage": True}}
    events, headers = gateway.stream_with_headers(path, asked)
    assert headers[_HEADER] == "pending"
    assert _chunks(events)[-1]["lockstep"]["cache"]["memory_tokens"] == 12
    gateway.scheduler.reply = _late(admits_first=True)
    headers = gateway.stream_with_headers(path, asked)[1]
    assert headers[_HEADER].startswith("memory=12; ")


def test_of_several_choices_the_first_one_speaks(gateway: RunningGateway) -> None:
    """The header is the first choice's; usage adds up prompts, each once."""

    def reply(request: SubmitRequest) -> Iterator[msgspec.Struct | float]:
        number = int(request.request_id.rpartition(":")[2])
        return say(_ids("Hello"), cached=CachedPrefix(memory_tokens=number + 1))(request)

    gateway.scheduler.reply = reply
    body, line = _whole(gateway, _CHAT, n=3)
    assert line.startswith("memory=1; ")
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    prompts = ["one two three", "four five six"]
    body, line = _whole(gateway, _TEXT, prompt=prompts, n=2)
    assert line == f"memory=1; ssd=0; computed={len(_ids(prompts[0])) - 1}"
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 1 + 3


def test_what_the_first_admission_found_stays(gateway: RunningGateway) -> None:
    """A scheduler that was restarted finds more: the tokens that it is given back."""

    def reply(request: SubmitRequest) -> Iterator[msgspec.Struct | float]:
        for cached in (_FOUND, CachedPrefix(memory_tokens=1_000)):
            yield RequestAdmitted(request_id=request.request_id, cached=cached)
        yield generated(request, 0, _ids("x")[:1])
        yield finished(request, 1, "stop", CachedPrefix(memory_tokens=1_000))

    gateway.scheduler.reply = reply
    body, line = _whole(gateway, _CHAT)
    assert line.startswith("memory=12; ssd=6; ")
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 18


def test_the_official_client_takes_it(gateway: RunningGateway) -> None:
    """Unknown fields and headers do not disturb it, whole, streamed or with its helper."""
    gateway.scheduler.reply = say([*_ids("Hello"), 2], cached=_FOUND)
    messages: list[Any] = _BODIES[_CHAT]["messages"]
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(model="tiny", messages=messages)
        assert raw.headers["x-lockstep-cache"].startswith("memory=12; ssd=6; ")
        answer = raw.parse()
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 18
        assert (answer.model_extra or {})["lockstep"]["cache"]["ssd_tokens"] == 6
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
def test_a_salt_reaches_the_scheduler(gateway: RunningGateway, path: str, salt: str) -> None:
    """B42: any characters; it only enters a hash."""
    _whole(gateway, path, cache_salt=salt)
    assert gateway.scheduler.orders[0].cache_salt == salt


@pytest.mark.parametrize("path", [_CHAT, _TEXT])
def test_without_a_salt_there_is_none(gateway: RunningGateway, path: str) -> None:
    """Left out and null are the same."""
    _whole(gateway, path)
    _whole(gateway, path, cache_salt=None)
    assert [order.cache_salt for order in gateway.scheduler.orders] == ["", ""]


@pytest.mark.parametrize("path", [_CHAT, _TEXT])
@pytest.mark.parametrize("salt", [1, True, ["x"], {}, "x" * 257, "x" * 2**20])
def test_a_wrong_salt_is_refused(gateway: RunningGateway, path: str, salt: Any) -> None:
    """B42: 400 that names it, and nothing at the scheduler."""
    status, body, _ = gateway.post(path, {"model": "tiny", **_BODIES[path], "cache_salt": salt})
    assert (status, body["error"]["param"]) == (400, "cache_salt")
    assert gateway.scheduler.orders == []


def test_prompts_carry_system_tokens_and_borders(gateway: RunningGateway) -> None:
    """Of conversations; to the token."""
    system = {"role": "system", "content": "The scheduler decides, every rank obeys."}
    user = {"role": "user", "content": "Hello, how are you?"}
    body = {"model": "tiny", "messages": [system, user], "tools": _TOOLS, "n": 2}
    assert gateway.post(_CHAT, body)[0] == 200
    for order in gateway.scheduler.orders:
        text = _TOKENIZER.decode(order.prompt, skip_special_tokens=False)
        before_user, _, rest = text.partition("Hello, how are you?")
        end = len(_ids(before_user + "Hello, how are you?<|im_end|>\n"))
        assert rest == "<|im_end|>\n<|im_start|>assistant\n"
        assert order.system_tokens == len(_ids(before_user))
        assert order.cache_boundaries == [len(_ids(before_user)), end]
        assert end < len(order.prompt)


def test_texts_and_short_conversations_carry_none(gateway: RunningGateway) -> None:
    """Nothing is known of a raw prompt; a prompt below one block leaves nothing to keep."""
    _whole(gateway, _TEXT, prompt="<|im_start|>system\nHello there<|im_end|>\n" * 8)
    _whole(gateway, _CHAT, messages=[{"role": "user", "content": "Hi"}])
    text, short = gateway.scheduler.orders
    assert len(text.prompt) >= 32 > len(short.prompt)
    assert (text.system_tokens, text.cache_boundaries) == (0, [])
    assert (short.system_tokens, short.cache_boundaries) == (0, [])
