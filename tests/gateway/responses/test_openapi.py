"""/openapi.json describes the real requests and responses.

`make test` tries 20 valid and 20 invalid requests per operation, `make proofs` 120 of each.
"""

import collections
import json
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from services.gateway.openai.response_types import (
    ChatCompletion,
    ChatCompletionChunk,
    GatewayStatus,
    TextCompletion,
    TextCompletionChunk,
)
from shared import limits
from tests.gateway import tiny_tokenizer
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import reply_with
from tests.support.effort import cases

_CHAT = "/v1/chat/completions"
_TEXT = "/v1/completions"
_CASES = cases(20, 120)
_CHECKS = [
    not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
]
_PATHS = [
    _CHAT, _TEXT, "/v1/models", "/v1/models/{name}", "/v1/lockstep/status", "/health", "/livez",
    "/readyz", "/metrics", "/openapi.json",
]  # fmt: skip


@pytest.fixture(scope="module")
def document(shared_gateway: RunningGateway) -> Any:
    """The document of a running gateway, parsed by Schemathesis."""
    return schemathesis.openapi.from_url(f"{shared_gateway.url}/openapi.json")


@pytest.mark.hypothesis
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize(
    ("path", "mode"),
    [
        *((path, GenerationMode.POSITIVE) for path in _PATHS),
        (_CHAT, GenerationMode.NEGATIVE),
        (_TEXT, GenerationMode.NEGATIVE),
    ],
)
def test_every_generated_request_gets_response_documented_in_openapi(
    gateway: RunningGateway, document: Any, path: str, mode: GenerationMode
) -> None:
    """No generated request gets a 5xx, every response is documented, invalid ones are refused."""
    gateway.scheduler.reply = reply_with([40, 41, 42])
    method = "POST" if path in (_CHAT, _TEXT) else "GET"
    operation = document[path][method]
    statuses: collections.Counter[int] = collections.Counter()

    @settings(max_examples=_CASES, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case[Any]) -> None:
        response = case.call(timeout=20)
        statuses[response.status_code] += 1
        gateway.scheduler.submitted.clear()
        case.validate_response(response, checks=_CHECKS)

    send()
    print(f"{method} {path} {mode.value}: {dict(statuses)}")
    assert gateway.get("/health")[0] == 200


_MESSAGES = [{"role": "user", "content": "Hello"}]
_CALL = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
_TOKENIZER = tiny_tokenizer.train()
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("path", "response_type", "chunk_type", "body", "text"),
    [
        (_CHAT, ChatCompletion, ChatCompletionChunk, {"messages": _MESSAGES}, "one two"),
        (
            _CHAT,
            ChatCompletion,
            ChatCompletionChunk,
            {"messages": _MESSAGES, "logprobs": True, "top_logprobs": 2, "n": 2},
            "one two",
        ),
        (
            _CHAT,
            ChatCompletion,
            ChatCompletionChunk,
            {"messages": _MESSAGES, "tools": _TOOLS},
            _CALL,
        ),
        (_TEXT, TextCompletion, TextCompletionChunk, {"prompt": "Hello"}, "one two"),
        (
            _TEXT,
            TextCompletion,
            TextCompletionChunk,
            {"prompt": ["Hello", "x"], "logprobs": 2},
            "one two",
        ),
        (_TEXT, TextCompletion, TextCompletionChunk, {"prompt": "Hello", "echo": True}, "one"),
    ],
)
def test_responses_and_stream_events_have_exactly_the_documented_fields(
    gateway: RunningGateway, path: str, response_type: Any, chunk_type: Any, body: Any, text: str
) -> None:
    """Whole and streamed responses have exactly the documented fields."""
    gateway.scheduler.reply = reply_with(_TOKENIZER.encode(text).ids)
    status, whole, _ = gateway.post(path, {"model": "tiny", **body})
    assert status == 200
    converted = msgspec.convert(whole, response_type)
    assert msgspec.to_builtins(converted) == whole
    for options in ({}, {"stream_options": {"include_usage": True}}):
        events = gateway.stream(path, {**body, **options})
        assert events.pop() == "[DONE]"
        for event in events:
            assert msgspec.to_builtins(msgspec.convert(event, chunk_type)) == event
        assert isinstance(events[-1], dict)
        assert ("lockstep" in events[-1]) == bool(options)
    if text == _CALL:
        assert whole["choices"][0]["finish_reason"] == "tool_calls"


def test_status_page_has_exactly_the_documented_fields(gateway: RunningGateway) -> None:
    """/v1/lockstep/status has exactly the documented fields."""
    status = json.loads(gateway.get("/v1/lockstep/status")[1])
    assert msgspec.to_builtins(msgspec.convert(status, GatewayStatus)) == status
    assert status["scheduler"]["model"] == "tiny"


def test_openapi_document_has_model_name_and_limits_of_configuration(
    gateway: RunningGateway,
) -> None:
    """The document has the model's name and vocabulary and the bounds of the configuration."""
    document = json.loads(gateway.get("/openapi.json")[1])
    fields = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert document["openapi"].startswith("3.1.")
    assert fields["model"]["const"] == "tiny"
    assert fields["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 8}
    assert fields["stop"]["anyOf"][1]["maxItems"] == 16
    speculation = document["components"]["schemas"]["SpeculationOptions"]["properties"]
    assert speculation["method"]["anyOf"] == [{"enum": ["default", "off", "ngram", None]}]
    bounds = speculation["tokens"]["anyOf"][0]
    assert (bounds["minimum"], bounds["maximum"]) == (0, limits.DRAFT_TOKENS_MAX)
    assert document["security"] == []
    ids = document["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"]["anyOf"][2]
    vocab_size = ids["items"]["maximum"] + 1
    body = {"model": "tiny", "prompt": [vocab_size - 1]}
    assert gateway.post(_TEXT, body)[0] == 200
    assert gateway.post(_TEXT, {**body, "prompt": [vocab_size]})[0] == 400
