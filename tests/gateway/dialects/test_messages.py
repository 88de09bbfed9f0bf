"""POST /v1/messages and its neighbours, with the requests that Claude Code sends."""

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway.dialects.messages.response_types import (
    MessagesError,
    MessagesResponse,
    TokenCount,
)
from shared.messages import (
    CachedPrefix,
    RequestAccepted,
    RequestAdmitted,
    RequestFailed,
    SubmitRequest,
)
from tests.gateway.running_gateway import FORGET_FULL_QUEUE, RunningGateway
from tests.gateway.scripted_scheduler import finished, generated, reply_with
from tests.gateway.tiny_tokenizer import completion_tokens, prompt_text

_PATH = "/v1/messages?beta=true"
_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,effort-2025-11-24",
    "X-Claude-Code-Session-Id": "4f6d1d2c-3a1b-4b69-9d8e-000000000000",
    "x-app": "cli",
}
_KEY = "alice-key-0123456789abcdef"
_CACHE = {"cache_control": {"type": "ephemeral"}}
_TOOLS = [
    {"name": "Read", "description": "Reads.", "input_schema": {"type": "object"}},
    {"name": "Grep", "defer_loading": True, "input_schema": {"type": "object"}},
]


def _body(**fields: Any) -> dict[str, Any]:
    """Return the first request of a session, short."""
    return {
        "model": "tiny",
        "max_tokens": 32_000,
        "stream": True,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.330.a1b;"},
            {"type": "text", "text": "You code.", **_CACHE},
        ],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello", **_CACHE}]}],
        "tools": _TOOLS,
        "thinking": {"type": "adaptive", "display": "summarized"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": json.dumps({"session_id": "s"})},
        **fields,
    }


def _events(raw: bytes) -> list[dict[str, Any]]:
    blocks = raw.decode().removesuffix("\n\n").split("\n\n")
    return [json.loads(block.partition("\ndata: ")[2]) for block in blocks]


def _post_raw(gateway: RunningGateway, body: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
    try:
        headers = {"Content-Type": "application/json", **_HEADERS}
        connection.request("POST", _PATH, json.dumps(body).encode(), headers)
        response = connection.getresponse()
        raw = response.read()
        return response.status, raw, {name.lower(): value for name, value in response.getheaders()}
    finally:
        connection.close()


def test_first_request_of_claude_code_is_served_and_its_ignored_fields_are_named(
    gateway: RunningGateway,
) -> None:
    """All fields of a real request are accepted, and the prompt has what the model must see."""
    gateway.scheduler.reply = reply_with(completion_tokens("Hello."))
    status, raw, headers = _post_raw(gateway, _body())
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["x-lockstep-ignored"] == "metadata, context_management"
    assert [event["type"] for event in _events(raw)][-2:] == ["message_delta", "message_stop"]
    prompt = prompt_text(gateway.scheduler.submitted[-1])
    assert "You code." in prompt
    assert "billing" not in prompt
    assert "Read" in prompt
    assert "Grep" not in prompt


def test_two_sessions_have_the_same_prompt_though_billing_and_marks_differ(
    gateway: RunningGateway,
) -> None:
    """Volatile parts never reach the prompt, so that sessions share the cache."""
    other = _body(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.330.zzz;"},
            {"type": "text", "text": "You code."},
        ],
        messages=[{"role": "user", "content": "Hello"}],
        metadata={"user_id": "other"},
    )
    _post_raw(gateway, _body())
    _post_raw(gateway, other)
    first, second = gateway.scheduler.submitted
    assert first.prompt == second.prompt


def test_pings_are_sent_before_the_message_starts(gateway: RunningGateway) -> None:
    """A client with a watch on idle bytes waits through the queue and a long prefill."""

    def reply(request: SubmitRequest) -> Iterator[msgspec.Struct | float]:
        yield RequestAccepted(request_id=request.request_id, queued_ahead=3)
        yield 1.2
        yield RequestAdmitted(request_id=request.request_id, cached=CachedPrefix())
        yield 0.6
        yield generated(request, 0, [40])
        yield finished(request, 1, "stop")

    gateway.scheduler.reply = reply
    _, raw, _ = _post_raw(gateway, _body())
    kinds = [event["type"] for event in _events(raw)]
    assert kinds.index("message_start") >= 3
    assert set(kinds[: kinds.index("message_start")]) == {"ping"}


def test_failure_inside_a_stream_is_its_last_event(gateway: RunningGateway) -> None:
    """After the headers no status is possible; clients repeat a request that ends with `error`."""

    def reply(request: SubmitRequest) -> Iterator[msgspec.Struct | float]:
        yield RequestAccepted(request_id=request.request_id, queued_ahead=0)
        yield RequestAdmitted(request_id=request.request_id, cached=CachedPrefix())
        yield generated(request, 0, [40])
        yield 0.2
        yield RequestFailed(request_id=request.request_id, cause="failed", detail="It broke.")

    gateway.scheduler.reply = reply
    status, raw, _ = _post_raw(gateway, _body())
    events = _events(raw)
    assert (status, events[-1]["type"]) == (200, "error")
    assert events[-1]["error"] == {"type": "api_error", "message": "It broke."}
    assert "message_stop" not in [event["type"] for event in events]


def test_reasoning_is_a_signed_thinking_block_and_comes_back_as_reasoning(
    gateway: RunningGateway,
) -> None:
    """What the model thinks is apart from its answer, streamed and whole."""
    text = "<think>\nI ponder.\n</think>\n\nHello."
    gateway.scheduler.reply = reply_with(completion_tokens(text))
    _, whole, _ = gateway.post(_PATH, _body(stream=False), _HEADERS)
    thinking, answer = whole["content"]
    assert (thinking["type"], thinking["thinking"].strip()) == ("thinking", "I ponder.")
    assert thinking["signature"]
    assert (answer["type"], answer["text"].strip()) == ("text", "Hello.")
    _, raw, _ = _post_raw(gateway, _body())
    deltas = [
        event["delta"]["type"] for event in _events(raw) if "index" in event and "delta" in event
    ]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta"]
    messages = [
        *_body()["messages"],
        {"role": "assistant", "content": whole["content"]},
        {"role": "user", "content": "More."},
    ]
    assert gateway.post(_PATH, _body(stream=False, messages=messages), _HEADERS)[0] == 200


def test_whole_messages_and_counts_have_exactly_the_documented_fields(
    gateway: RunningGateway,
) -> None:
    """Answers have the documented types."""
    call = '<tool_call>{"name":"Read","arguments":{"a":1}}</tool_call>'
    gateway.scheduler.reply = reply_with(completion_tokens(f"Text {call}"))
    status, whole, _ = gateway.post(_PATH, _body(stream=False), _HEADERS)
    assert status == 200
    assert msgspec.to_builtins(msgspec.convert(whole, MessagesResponse)) == whole
    fields = {name: _body()[name] for name in ("model", "system", "messages", "tools")}
    status, counted, _ = gateway.post("/v1/messages/count_tokens?beta=true", fields, _HEADERS)
    assert status == 200
    assert msgspec.convert(counted, TokenCount).input_tokens == sum(
        whole["usage"][name]
        for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    )


@pytest.mark.parametrize(
    ("fields", "status", "kind", "words"),
    [
        ({"model": "other"}, 404, "not_found_error", "other"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"temperature": 1.5}, 400, "invalid_request_error", "temperature"),
        ({"tool_choice": {"type": "tool", "name": "no"}}, 400, "invalid_request_error",
         "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"},
                    {"name": "look", "strict": True,
                     "input_schema": {"properties": {"x": {"not": {}}}}}]},
         400, "invalid_request_error", "tools[1].input_schema.properties.x"),
        ({"stop_sequences": ["x"] * 17}, 400, "invalid_request_error", "stop_sequences"),
        ({"mcp_servers": [{"name": "x"}]}, 400, "invalid_request_error", "mcp_servers"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": "refuse me"}]}, 400, "invalid_request_error",
         "refuses"),
        ({"messages": [{"role": "user", "content": "long " * 9_000}]}, 400,
         "invalid_request_error", "prompt is too long: "),
    ],
)  # fmt: skip
def test_refused_request_gets_error_in_anthropic_form_before_any_event(
    gateway: RunningGateway, fields: dict[str, Any], status: int, kind: str, words: str
) -> None:
    """Errors before the stream have a status, a type and a text that names the cause."""
    answered, raw, headers = _post_raw(gateway, _body(**fields))
    assert answered == status
    error = msgspec.json.decode(raw, type=MessagesError)
    assert error.error.type == kind
    assert words in error.error.message
    assert headers["request-id"] == error.request_id
    assert gateway.scheduler.submitted == []


def test_wrong_method_and_path_below_messages_have_anthropic_form(gateway: RunningGateway) -> None:
    """Errors of routing have the dialect's form too."""
    assert json.loads(gateway.get("/v1/messages")[1])["type"] == "error"
    status, body, _ = gateway.post("/v1/messages/batches", {})
    assert (status, body["error"]["type"]) == (404, "not_found_error")


def test_claude_code_finds_server_and_models(gateway: RunningGateway) -> None:
    """The first calls of the client are answered, and both forms of the model list exist."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=20)
    with contextlib.closing(connection):
        connection.request("HEAD", "/api/hello")
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b"")
    page = json.loads(gateway.get("/v1/models?limit=1000", _HEADERS)[1])
    assert page["has_more"] is False
    assert page["data"][0]["id"] == page["first_id"] == page["last_id"] == "tiny"
    assert page["data"][0]["type"] == "model"
    assert json.loads(gateway.get("/v1/models")[1])["object"] == "list"
    assert json.loads(gateway.get("/v1/models/other", _HEADERS)[1])["type"] == "error"


_ENDING_WITH_ASSISTANT = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "y"},
]


def test_history_that_ends_with_the_assistant_is_counted_but_not_answered(
    gateway: RunningGateway,
) -> None:
    """Clients count the tokens of a conversation between its turns; nothing is generated there."""
    body = {"model": "tiny", "messages": _ENDING_WITH_ASSISTANT}
    status, counted, _ = gateway.post("/v1/messages/count_tokens", body, _HEADERS)
    assert (status, counted["input_tokens"] > 0) == (200, True)
    status, refused, _ = gateway.post("/v1/messages", {**body, "max_tokens": 9}, _HEADERS)
    assert (status, "messages[1]" in refused["error"]["message"]) == (400, True)


@pytest.mark.parametrize("content", ["", [{"type": "tool_addition"}]])
def test_last_message_without_known_content_is_left_out(
    gateway: RunningGateway, content: object
) -> None:
    """A block that did not exist when this was written must not end a session."""
    messages = [*_ENDING_WITH_ASSISTANT, {"role": "user", "content": content}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 9}
    status, answer, headers = gateway.post("/v1/messages", body, _HEADERS)
    assert status == 200, answer
    ignored = headers.get("x-lockstep-ignored", "")
    assert ("messages.content.tool_addition" in ignored) == bool(content)


@pytest.fixture(scope="module")
def named_gateway(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """A gateway with API keys whose model has aliases."""
    with RunningGateway.start(
        model_folder,
        tmp_path_factory.mktemp("run"),
        prelude=FORGET_FULL_QUEUE,
        environment={"LOCKSTEP_API_KEYS": f"alice={_KEY}"},
        aliases=["gpt-5", "claude-*"],
    ) as running:
        yield running


@pytest.mark.parametrize("header", [{"x-api-key": _KEY}, {"Authorization": f"Bearer {_KEY}"}])
def test_both_headers_of_api_keys_are_accepted_and_aliases_are_named_back(
    named_gateway: RunningGateway, header: dict[str, str]
) -> None:
    """Claude Code sends its key in either header, and expects the model name that it sent."""
    named_gateway.scheduler.reply = reply_with([40, 2])
    body = _body(stream=False, model="claude-opus-9", tools=None)
    status, answer, _ = named_gateway.post(_PATH, body, header)
    assert (status, answer["model"]) == (200, "claude-opus-9")


def test_missing_key_is_authentication_error(named_gateway: RunningGateway) -> None:
    """A 401 has Anthropic's type."""
    status, answer, _ = named_gateway.post(_PATH, _body())
    assert (status, answer["error"]["type"]) == (401, "authentication_error")


def test_aliases_work_in_all_dialects_and_names_that_match_none_are_refused(
    named_gateway: RunningGateway,
) -> None:
    """Names and patterns are accepted; the list shows names only."""
    key = {"x-api-key": _KEY}
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for model, expected in (("gpt-5", 200), ("claude-x", 200), ("tiny", 200), ("gpt-6", 404)):
        status, answer, _ = named_gateway.post(
            "/v1/chat/completions", {**chat, "model": model}, key
        )
        assert status == expected
        assert answer.get("model", model) == model
    listed = json.loads(named_gateway.get("/v1/models", key)[1])["data"]
    assert [model["id"] for model in listed] == ["tiny", "gpt-5"]
    assert json.loads(named_gateway.get("/v1/models/claude-x", key)[1])["id"] == "claude-x"


def test_any_model_is_served_where_the_operator_wants_it(
    model_folder: Path, tmp_path: Path
) -> None:
    """With gateway.unknown_model = "serve" every name gets the served model."""
    with RunningGateway.start(model_folder, tmp_path, unknown_model="serve") as gateway:
        status, answer, _ = gateway.post(_PATH, _body(stream=False, model="anything", tools=None))
        assert (status, answer["model"]) == (200, "anything")
        assert gateway.post(_PATH, _body(stream=False, model="x" * 300))[0] == 404
