"""The Responses API as Codex uses it: its requests, tools, errors and model catalog."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import openai
import pytest

from services.gateway.dialects.responses.response_types import ModelResponse
from shared.messages import CachedPrefix, RequestFailed, SubmitRequest
from tests.gateway.dialects.responses_requests import (
    APPLY_PATCH,
    Json,
    call,
    codex_request,
    stream,
)
from tests.gateway.running_gateway import FORGET_FULL_QUEUE, RunningGateway
from tests.gateway.scripted_scheduler import generated, ready_status, reject_with, reply_with
from tests.gateway.tiny_tokenizer import completion_tokens, prompt_text

CONTEXT_TOKENS = 20_000
_FUNCTION = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"x": {"not": {}}}},
}


@pytest.fixture(scope="module")
def large_gateway(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """A gateway whose model has room for an agent's prompt."""
    report = ready_status(context_tokens_max=CONTEXT_TOKENS)
    run_dir = tmp_path_factory.mktemp("run")
    started = RunningGateway.start(
        model_folder, run_dir, report=report, prelude=FORGET_FULL_QUEUE, keepalive_s=0.3
    )
    with started as running:
        yield running


@pytest.fixture
def codex_gateway(large_gateway: RunningGateway) -> RunningGateway:
    """The same gateway with a scheduler that replies with a sentence."""
    large_gateway.scheduler.reset()
    large_gateway.scheduler.status = ready_status(context_tokens_max=CONTEXT_TOKENS)
    large_gateway.scheduler.reply = reply_with(
        completion_tokens("Hello, how are you?"), cached=CachedPrefix(memory_tokens=4)
    )
    return large_gateway


def done_items(events: list[Json]) -> list[Json]:
    """Return the finished items of a stream."""
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


def test_codex_request_is_served_and_what_has_no_effect_is_reported(
    codex_gateway: RunningGateway,
) -> None:
    """Every field that Codex sends is accepted; tools that need a service are left out."""
    events, headers = stream(codex_gateway, codex_request())
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == "response.completed"
    usage = last["response"]["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 4
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert done_items(events)[0]["content"][0]["text"] == "Hello, how are you?"
    ignored = headers["x-lockstep-ignored"].split(", ")
    assert set(ignored) == {"client_metadata", "tools.web_search"}
    assert last["response"]["store"] is False
    shown = prompt_text(codex_gateway.scheduler.submitted[-1])
    assert "agents__spawn_agent" in shown
    assert "web_search" not in shown
    # Nothing limits the answer, so it may fill the context.
    submitted = codex_gateway.scheduler.submitted[-1]
    assert submitted.max_tokens == CONTEXT_TOKENS - submitted.prompt_tokens


def test_responses_have_exactly_the_documented_fields(codex_gateway: RunningGateway) -> None:
    """Whole responses, and those in the events of a stream, are of the documented type."""
    status, whole, _ = codex_gateway.post("/v1/responses", {**codex_request(), "stream": False})
    assert status == 200
    events, _ = stream(codex_gateway, codex_request())
    found = [whole, *(event["response"] for event in events if "response" in event)]
    assert len(found) == 4
    for response in found:
        assert msgspec.to_builtins(msgspec.convert(response, ModelResponse)) == response


def test_codex_tool_calls_come_back_in_its_own_shapes_and_go_on(
    codex_gateway: RunningGateway,
) -> None:
    """A namespaced call has two fields, a custom tool's call raw text, and both can be answered."""
    codex_gateway.scheduler.reply = reply_with(
        completion_tokens(
            "I start.\n"
            + call("exec_command", cmd="ls")
            + call("agents__spawn_agent", task="Grüße")
            + call("apply_patch", input=APPLY_PATCH)
        )
    )
    events, _ = stream(codex_gateway, codex_request())
    message, command, spawn, patch = items = done_items(events)
    assert message["content"][0]["text"].strip() == "I start."
    assert (command["type"], command["name"]) == ("function_call", "exec_command")
    assert json.loads(command["arguments"]) == {"cmd": "ls"}
    assert (spawn["namespace"], spawn["name"]) == ("agents", "spawn_agent")
    assert (patch["type"], patch["input"]) == ("custom_tool_call", APPLY_PATCH)
    assert all(item["id"] and item.get("call_id", "-") for item in items)
    outputs: list[Json] = [
        {"type": f"{one['type']}_output", "call_id": one["call_id"], "output": "ok"}
        for one in items[1:]
    ]
    reasoning: Json = {"type": "reasoning", "summary": [], "encrypted_content": None}
    again = codex_request(reasoning, *items, *outputs)
    events, _ = stream(codex_gateway, again)
    assert events[-1]["type"] == "response.completed"
    assert prompt_text(codex_gateway.scheduler.submitted[-1]).count("<|im_start|>tool\nok") == 3


@pytest.mark.parametrize("summary", ["auto", None])
def test_reasoning_is_an_item_of_its_own_and_is_read_when_it_comes_back(
    codex_gateway: RunningGateway, summary: str | None
) -> None:
    """Reasoning stands in the summary that the client asked for, else in the content."""
    codex_gateway.scheduler.reply = reply_with(
        completion_tokens("<think>I think of it.</think>\n\nIt is so.")
    )
    request = {**codex_request(), "reasoning": {"summary": summary}}
    events, _ = stream(codex_gateway, request)
    reasoning, message = done_items(events)
    place: list[Json] = reasoning["summary"] if summary else reasoning["content"]
    assert [part["text"] for part in place] == ["I think of it."]
    assert message["content"][0]["text"].strip() == "It is so."
    usage = events[-1]["response"]["usage"]
    assert 3 <= usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    status, whole, _ = codex_gateway.post("/v1/responses", {**request, "stream": False})
    assert status == 200
    assert whole["usage"] == usage
    again = codex_request(reasoning, message, {"role": "user", "content": "More"})
    assert stream(codex_gateway, again)[0][-1]["type"] == "response.completed"


def test_prompt_too_long_is_a_400_that_codex_recognises(codex_gateway: RunningGateway) -> None:
    """Codex makes a summary after this code instead of trying again."""
    text = {"type": "message", "role": "user", "content": "漢字 " * CONTEXT_TOKENS}
    status, body, _ = codex_gateway.post("/v1/responses", codex_request(text))
    assert status == 400
    assert body["error"]["code"] == "context_length_exceeded"
    assert body["error"]["param"] == "input"


def test_truncation_auto_leaves_out_the_oldest_items(codex_gateway: RunningGateway) -> None:
    """With `auto` the request is served, with its instructions and its newest message."""
    old = [
        {"type": "message", "role": "user", "content": f"old {number} " + "漢字 " * 500}
        for number in range(60)
    ]
    newest = {"type": "message", "role": "user", "content": "newest message"}
    request = {**codex_request(*old, newest), "truncation": "auto", "instructions": "Be kind."}
    events, _ = stream(codex_gateway, request)
    assert events[-1]["type"] == "response.completed"
    shown = prompt_text(codex_gateway.scheduler.submitted[-1])
    assert "Be kind." in shown
    assert "newest message" in shown
    assert "old 0 " not in shown


def test_full_queue_before_the_stream_is_a_429(codex_gateway: RunningGateway) -> None:
    """Codex repeats the request after Retry-After."""
    codex_gateway.scheduler.reply = reject_with("queue_full", "Full.")
    status, body, headers = codex_gateway.post("/v1/responses", codex_request())
    assert (status, body["error"]["code"]) == (429, "queue_full")
    assert int(headers["retry-after"]) >= 1


def test_failure_inside_the_stream_is_response_failed(codex_gateway: RunningGateway) -> None:
    """The stream ends with an event and a code that Codex knows."""

    def reply(request: SubmitRequest) -> Iterator[object]:
        yield generated(request, 0, completion_tokens("Hello")[:1])
        yield 1.0
        yield RequestFailed(request_id=request.request_id, cause="failed", detail="It broke.")

    codex_gateway.scheduler.reply = reply  # type: ignore[assignment]
    events, _ = stream(codex_gateway, codex_request())
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "It broke."}


def _slow_reply(request: SubmitRequest) -> Iterator[msgspec.Struct | float]:
    """Reply with two words after a long prefill and with pauses."""
    quick = reply_with(completion_tokens("Hello you"), pause_s=0.7)(request)
    yield next(quick)
    yield next(quick)
    yield 0.8
    yield from quick


def test_events_flow_while_codex_waits(codex_gateway: RunningGateway) -> None:
    """Events arrive before the first token: comments do not stop Codex's timer for silence."""
    codex_gateway.scheduler.reply = _slow_reply
    body = json.dumps(codex_request()).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    kind = "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    received = codex_gateway.send(head.encode() + kind.encode() + body, timeout_s=20.0)
    before_text, _, after = received.partition(b"event: response.output_item.added\n")
    assert before_text.count(b"event: response.in_progress\n") > 1
    assert b"event: response.in_progress\n" not in after
    assert b"response.completed" in received


def test_official_client_reads_stream_with_keep_alives(codex_gateway: RunningGateway) -> None:
    """Keep-alives before and inside the answer leave what the client collects as it is."""
    codex_gateway.scheduler.reply = _slow_reply
    url = f"{codex_gateway.url}/v1"
    with (
        openai.OpenAI(base_url=url, api_key="none", timeout=20) as client,
        client.responses.stream(model="tiny", input="Hello", store=False) as stream,
    ):
        kinds = Counter(event.type for event in stream)
        assert stream.get_final_response().output_text == "Hello you"
    assert kinds["response.in_progress"] > 1
    assert kinds["response.output_text.delta"] > len(completion_tokens("Hello you"))


def test_model_catalog_stands_beside_the_list_of_models(codex_gateway: RunningGateway) -> None:
    """Codex learns the context and that patches may be free text."""
    status, body = codex_gateway.get("/v1/models?client_version=0.169.0")
    assert status == 200
    content = json.loads(body)
    assert content["data"][0]["id"] == "tiny"
    [entry] = content["models"]
    assert entry["slug"] == "tiny"
    assert entry["context_window"] == CONTEXT_TOKENS
    assert entry["apply_patch_tool_type"] == "freeform"
    assert entry["base_instructions"]
    assert set(entry) >= {
        "display_name", "description", "default_reasoning_level", "supported_reasoning_levels",
        "shell_type", "visibility", "supported_in_api", "priority",
        "supports_reasoning_summaries", "default_reasoning_summary", "support_verbosity",
        "truncation_policy", "supports_parallel_tool_calls", "max_context_window",
        "effective_context_window_percent", "experimental_supported_tools", "input_modalities",
        "supports_search_tool",
    }  # fmt: skip
    assert "models" not in json.loads(codex_gateway.get("/v1/models")[1])


def test_response_id_is_not_found_where_no_responses_are_kept(
    codex_gateway: RunningGateway,
) -> None:
    """Such a server says so, and a request without `store` is not stored."""
    request = {**codex_request(), "previous_response_id": "resp_1", "stream": False}
    status, body, _ = codex_gateway.post("/v1/responses", request)
    assert (status, body["error"]["code"]) == (404, "previous_response_not_found")
    del request["previous_response_id"], request["store"]
    status, body, _ = codex_gateway.post("/v1/responses", request)
    assert (status, body["store"]) == (200, False)
    assert codex_gateway.get(f"/v1/responses/{body['id']}")[0] == 404
    status, body, _ = codex_gateway.post("/v1/responses/input_tokens", {**request, "store": True})
    assert (status, body["object"]) == (200, "response.input_tokens"), "counting stores nothing"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"store": True}, "store"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"tool_choice": {"type": "function", "name": "missing"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "mystery"}}}, "text.format.type"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]},
         "input[0].call_id"),
        ({"tools": [_FUNCTION, _FUNCTION]}, "tools"),
        ({"tools": [_FUNCTION, {"type": "custom", "name": "look"}]}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}, {**_FUNCTION, "strict": True}]},
         "tools[1].parameters.properties.x"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ],
)  # fmt: skip
def test_fields_that_cannot_be_honoured_are_refused_by_name(
    codex_gateway: RunningGateway, fields: Json, param: str
) -> None:
    """What would give a wrong answer is a 400 that names the field."""
    status, body, _ = codex_gateway.post("/v1/responses", {**codex_request(), **fields})
    assert status == 400, body
    assert body["error"]["param"] == param
