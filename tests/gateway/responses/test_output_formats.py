"""Reasoning and tool calls of a model whose markers are special tokens, streamed and whole."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken

from tests.gateway import tiny_tokenizer
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import reply_with

_MARKERS = [
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
]
_TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>tools<|tool_call_begin|>' + (tools | tojson) }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}"
    "{%- endfor %}{{- '<|im_start|>assistant\n<think>' }}"
)
_TOKENIZER = tiny_tokenizer.train()
_TOKENIZER.add_special_tokens([AddedToken(marker, special=True) for marker in _MARKERS])
_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
_ARGUMENTS = '{"city": "Köln <|tool_call_end|>", "days": [1, 2]}'
_CALLS = (
    f"{_MARKERS[0]}{_MARKERS[1]}functions.weather:0{_MARKERS[2]}"
    f"{_ARGUMENTS}{_MARKERS[3]}{_MARKERS[4]}"
)


def _ids(text: str) -> list[int]:
    ids: list[int] = _TOKENIZER.encode(text).ids
    return ids


_STOP = _ids("<|im_end|>")


@pytest.fixture(scope="module")
def kimi_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """A gateway with a tokenizer and a template like Kimi's."""
    folder = tiny_tokenizer.write_model_folder(tmp_path_factory.mktemp("kimi"))
    _TOKENIZER.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = _TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with RunningGateway.start(folder, tmp_path_factory.mktemp("run")) as running:
        yield running


def _streamed(gateway: RunningGateway, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the message that the deltas of a stream make."""
    body = {"messages": [{"role": "user", "content": "Hello"}], **fields}
    message: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": ""}
    for chunk in gateway.stream("/v1/chat/completions", body):
        delta = chunk["choices"][0]["delta"] if isinstance(chunk, dict) else {}
        for key in ("content", "reasoning", "reasoning_content"):
            message[key] += delta.get(key) or ""
        for call in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({key: call[key] for key in ("id", "type", "function")})
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return message


def test_reasoning_begun_by_the_template_and_call_between_special_tokens_are_parsed(
    kimi_gateway: RunningGateway,
) -> None:
    """Reasoning and a call with its own id come out, alike in a stream and as a whole."""
    tokens = [*_ids(f"I look.\n</think>\n\nJust a moment.\n{_CALLS}"), *_STOP]
    kimi_gateway.scheduler.reply = reply_with(tokens)

    status, body = kimi_gateway.chat("Hello", tools=_TOOLS)
    streamed = _streamed(kimi_gateway, {"tools": _TOOLS})

    assert status == 200
    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == streamed["content"] == "Just a moment."
    assert message["reasoning_content"] == message["reasoning"] == "I look."
    assert streamed["reasoning_content"] == streamed["reasoning"] == "I look."
    assert message["tool_calls"] == streamed["tool_calls"]
    [call] = message["tool_calls"]
    assert call["id"] == "functions.weather:0"
    assert call["function"]["name"] == "weather"
    assert call["function"]["arguments"] == _ARGUMENTS


def test_chat_without_tools_has_reasoning_apart_and_markers_of_calls_are_no_text(
    kimi_gateway: RunningGateway,
) -> None:
    """Without tools, reasoning is still no part of the answer."""
    kimi_gateway.scheduler.reply = reply_with([*_ids("Hm.</think>Hello <|tool_call_end|>"), *_STOP])

    message = kimi_gateway.chat("Hello")[1]["choices"][0]["message"]

    assert message["content"] == "Hello "
    assert message["reasoning_content"] == "Hm."


@pytest.mark.parametrize("more", [{}, {"tools": _TOOLS}])
def test_only_tokens_of_the_answer_have_log_probabilities(
    kimi_gateway: RunningGateway, more: dict[str, Any]
) -> None:
    """Those of reasoning and calls are left out; streamed and whole ones are equal."""
    answer = _ids("Hello there")
    calls = _ids(_CALLS) if more else []
    kimi_gateway.scheduler.reply = reply_with([*_ids("Hm.</think>"), *answer, *calls, *_STOP])
    fields = {"logprobs": True, **more}

    choice = kimi_gateway.chat("Hello", **fields)[1]["choices"][0]
    assert choice["finish_reason"] == ("tool_calls" if more else "stop")
    whole = choice["logprobs"]["content"]
    messages = [{"role": "user", "content": "Hello"}]
    events = kimi_gateway.stream("/v1/chat/completions", {"messages": messages, **fields})

    streamed = [
        entry
        for chunk in events
        if isinstance(chunk, dict) and chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert [bytes(entry["bytes"]) for entry in whole] == [
        _TOKENIZER.decode([token]).encode() for token in answer
    ]
    assert streamed == whole


def test_broken_call_is_text_and_never_an_error(kimi_gateway: RunningGateway) -> None:
    """Text that begins like a call but has no name stays in the answer."""
    text = "</think>See <|tool_call_begin|> here"
    kimi_gateway.scheduler.reply = reply_with([*_ids(text), *_STOP])

    status, body = kimi_gateway.chat("Hello", tools=_TOOLS)

    assert status == 200
    choice = body["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "See <|tool_call_begin|> here"


def test_models_and_status_name_the_formats(kimi_gateway: RunningGateway) -> None:
    """Operators and clients see which formats are parsed."""
    for path in ("/v1/models/tiny", "/v1/lockstep/status"):
        status, answer = kimi_gateway.get(path)
        assert status == 200
        body = json.loads(answer)
        assert (body["tool_format"], body["reasoning_format"]) == ("kimi_k2", "think")
