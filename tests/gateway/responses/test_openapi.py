"""/openapi.json describes the real requests and responses.

`make test` tries 10 valid and 10 invalid requests per operation, `make proofs` 120 of each.
"""

import collections
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
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

from services.gateway.dialects.openai.response_types import (
    ChatCompletion,
    ChatCompletionChunk,
    GatewayStatus,
    TextCompletion,
    TextCompletionChunk,
)
from shared import limits
from tests.cache_store.running_store import RunningStore
from tests.gateway import tiny_tokenizer
from tests.gateway.running_gateway import FORGET_FULL_QUEUE, RunningGateway
from tests.gateway.scripted_scheduler import reply_with
from tests.support.effort import cases
from tests.support.waiting import wait_until

_CHAT = "/v1/chat/completions"
_TEXT = "/v1/completions"
_CASES = cases(10, 50)
_CHECKS = [
    not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
]
_COUNT = "/v1/messages/count_tokens"
_STORED = "/v1/responses/{response_id}"
_RESPONSES = "/v1/responses"
_POSTS = [
    _CHAT, _TEXT, _RESPONSES, "/v1/responses/input_tokens", "/v1/messages", _COUNT,
    "/tokenize", "/detokenize",
]  # fmt: skip
_GETS = [
    _STORED, f"{_STORED}/input_items", "/v1/models", "/v1/models/{name}",
    "/v1/lockstep/status", "/health", "/livez", "/readyz", "/metrics", "/openapi.json",
]  # fmt: skip
_OPERATIONS = [*(("POST", path) for path in _POSTS), *(("GET", path) for path in _GETS)]
_OPERATIONS += [("DELETE", _STORED)]


@pytest.fixture(scope="module")
def shared_gateway(model_folder: Path) -> Iterator[RunningGateway]:
    """A gateway beside a cache store, which keeps responses."""
    home = Path(tempfile.mkdtemp(prefix="ls-"))
    store = RunningStore(home)
    store.start()
    wait_until((store.run_dir / "store.sock").exists, 30.0, failure="the store does not listen")
    started = RunningGateway.start(
        model_folder, store.run_dir, prelude=FORGET_FULL_QUEUE, has_store=True, keepalive_s=0.3
    )
    with started as running:
        yield running
    store.close()
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="module")
def document(shared_gateway: RunningGateway) -> Any:
    """The document of a running gateway, parsed by Schemathesis."""
    return schemathesis.openapi.from_url(f"{shared_gateway.url}/openapi.json")


def _with_integers(value: Any) -> Any:
    """Return JSON with 1 in place of 1.0, which JSON Schema calls an integer and servers refuse."""
    if isinstance(value, dict):
        return {name: _with_integers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_with_integers(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.mark.hypothesis
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        *((*operation, GenerationMode.POSITIVE) for operation in _OPERATIONS),
        *(("POST", path, GenerationMode.NEGATIVE) for path in _POSTS),
    ],
)
def test_every_generated_request_gets_response_documented_in_openapi(
    gateway: RunningGateway, document: Any, method: str, path: str, mode: GenerationMode
) -> None:
    """No generated request gets a 5xx, every response is documented, invalid ones are refused."""
    gateway.scheduler.reply = reply_with([40, 41, 42])
    operation = document[path][method]
    statuses: collections.Counter[int] = collections.Counter()

    @settings(max_examples=_CASES, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case[Any]) -> None:
        case.body = _with_integers(case.body)
        response = case.call(timeout=20)
        statuses[response.status_code] += 1
        gateway.scheduler.submitted.clear()
        case.validate_response(response, checks=_CHECKS)

    send()
    print(f"{method} {path} {mode.value}: {dict(statuses)}")
    assert gateway.get("/health")[0] == 200


def test_stored_response_has_the_documented_form_until_it_is_deleted(
    gateway: RunningGateway, document: Any
) -> None:
    """A response, its copy in the store, its input and its deletion match their schemas."""
    gateway.scheduler.reply = reply_with([40, 41, 42])

    def keeps() -> bool:
        return gateway.post(_RESPONSES, {"model": "tiny", "input": "Hi"})[1]["store"] is True

    wait_until(keeps, 20.0, poll_s=0.2, failure="the gateway keeps no responses")
    body = {"model": "tiny", "input": "Hello", "store": True}
    made = document[_RESPONSES]["POST"].Case(body=body).call_and_validate(checks=_CHECKS).json()
    name = {"response_id": made["id"]}
    for method, path, status in [
        ("GET", _STORED, 200),
        ("GET", f"{_STORED}/input_items", 200),
        ("DELETE", _STORED, 200),
        ("GET", _STORED, 404),
        ("DELETE", _STORED, 404),
    ]:
        case = document[path][method].Case(path_parameters=name)
        response = case.call_and_validate(checks=_CHECKS)
        assert response.status_code == status
        if path == _STORED and method == "GET" and status == 200:
            assert response.json() == made


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
    assert fields["model"]["enum"] == ["tiny"]
    assert fields["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 8}
    assert fields["stop"]["anyOf"][1]["maxItems"] == 16
    speculation = document["components"]["schemas"]["SpeculationOptions"]["properties"]
    assert speculation["method"]["anyOf"] == [{"enum": ["default", "off", "ngram", None]}]
    bounds = speculation["tokens"]["anyOf"][0]
    assert (bounds["minimum"], bounds["maximum"]) == (0, limits.DRAFT_TOKENS_MAX)
    assert document["security"] == []
    assert not [
        operation
        for path in document["paths"].values()
        for method, operation in path.items()
        if method in ("get", "post", "delete") and "401" in operation["responses"]
    ]
    ids = document["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"]["anyOf"][2]
    vocab_size = ids["items"]["maximum"] + 1
    body = {"model": "tiny", "prompt": [vocab_size - 1]}
    assert gateway.post(_TEXT, body)[0] == 200
    assert gateway.post(_TEXT, {**body, "prompt": [vocab_size]})[0] == 400
