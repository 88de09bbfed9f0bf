"""Requests for structured output: the scheduler gets a grammar, or the client a 400 with a path."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shared.messages import Grammar
from tests.gateway import tiny_tokenizer
from tests.gateway.running_gateway import RunningGateway

_STOP = tiny_tokenizer.train().token_to_id("<|im_end|>")
_SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
_MESSAGES = [{"role": "user", "content": "Hello"}]
_TOOL = {"name": "look", "parameters": _SCHEMA}

_INPUT = [{"type": "message", "role": "user", "content": "x"}]


def _post(gateway: RunningGateway, path: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    defaults: dict[str, Any] = {"model": "tiny"}
    if path == "/v1/chat/completions":
        defaults["messages"] = _MESSAGES
    status, body, _ = gateway.post(path, {**defaults, **fields})
    return status, body


def _grammar(gateway: RunningGateway, path: str, **fields: Any) -> Grammar:
    status, body = _post(gateway, path, **fields)
    assert status == 200, body
    grammar = gateway.scheduler.submitted[-1].grammar
    assert grammar is not None
    assert _STOP in grammar.end_ids
    return grammar


def test_integers_of_any_size_and_deep_tools_without_effect_are_no_error(
    gateway: RunningGateway,
) -> None:
    """What a client may write in JSON is served, or refused by name."""
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    for fields in (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"const": 10**30}}}},
        {"tools": [{"type": "unheard_of", "number": 10**30, "deep": deep}]},
        {"metadata": {"number": "1"}, "input": [{"type": "unheard_of", "number": 10**30}, *_INPUT]},
    ):
        status, body = _post(gateway, "/v1/responses", **{"input": _INPUT, **fields})
        assert status == 200, body


def test_prompt_does_not_wait_for_grammars_that_take_seconds_to_check(
    gateway: RunningGateway,
) -> None:
    """They have threads of their own, which only requests with grammars need."""

    def hostile(number: int) -> int:
        parts = [{"type": "string", "pattern": f"{number}a{n}"} for n in range(60)]
        return _post(gateway, "/v1/chat/completions", guided_json=json.dumps({"allOf": parts}))[0]

    with ThreadPoolExecutor(3) as pool:
        statuses = [pool.submit(hostile, number) for number in range(3)]
        time.sleep(0.5)
        began_s = time.monotonic()
        assert _post(gateway, "/v1/chat/completions")[0] == 200
        waited_s = time.monotonic() - began_s
        assert {one.result() for one in statuses} <= {400, 429}
    assert waited_s < 2.0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "json_object"}}, '"object"'),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": _SCHEMA, "strict": True},
                }
            },
            '"n"',
        ),
        ({"guided_json": json.dumps(_SCHEMA)}, '"n"'),
        ({"guided_regex": "[a-c]+"}, "[a-c]+"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes"),
        ({"structured_outputs": {"grammar": 'start: "unmistakable"'}}, "unmistakable"),
    ],
)
def test_constraint_of_a_chat_reaches_the_scheduler_as_a_grammar(
    gateway: RunningGateway, fields: dict[str, Any], named: str
) -> None:
    """OpenAI's and vLLM's fields become a grammar; all choices of a request have it."""
    grammar = _grammar(gateway, "/v1/chat/completions", n=2, **fields)
    assert named in grammar.text
    assert [one.grammar for one in gateway.scheduler.submitted[-2:]] == [grammar] * 2


def test_constraint_of_a_raw_completion_reaches_the_scheduler_as_a_grammar(
    gateway: RunningGateway,
) -> None:
    """The other endpoint has the same fields of vLLM."""
    grammar = _grammar(gateway, "/v1/completions", prompt="One", guided_choice=["two", "three"])
    assert "three" in grammar.text


def test_request_without_a_constraint_has_no_grammar(gateway: RunningGateway) -> None:
    """Text, and tools that the model is free to call, are not constrained."""
    tools = [{"type": "function", "function": _TOOL}]
    for fields in ({}, {"response_format": {"type": "text"}}, {"tools": tools}):
        status, body = _post(gateway, "/v1/chat/completions", **fields)
        assert status == 200, body
        assert gateway.scheduler.submitted[-1].grammar is None


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "look"}}},
        {"tool_choice": "auto", "strict": True},
    ],
)
def test_demanded_and_strict_calls_reach_the_scheduler_as_a_grammar_of_the_model_s_own_format(
    gateway: RunningGateway, fields: dict[str, Any]
) -> None:
    """The grammar has the marker that the model's template shows, and the tool's name."""
    strict = fields.get("strict", False)
    tools = [{"type": "function", "function": {**_TOOL, "strict": strict}}]
    grammar = _grammar(
        gateway, "/v1/chat/completions", tools=tools, tool_choice=fields["tool_choice"]
    )
    lark = json.loads(grammar.text)["grammars"][0]["lark_grammar"]
    assert "<tool_call>" in lark
    assert "look" in lark
    assert ('"integer"' in grammar.text) == strict


def test_free_choice_of_a_custom_tool_has_a_grammar_or_is_served_without(
    model_folder: Path, tmp_path: Path
) -> None:
    """Codex sends one with the choice `auto`. A grammar that does not compile, or for which there
    is no time, is no error."""
    prelude = (
        "from services.gateway.endpoints import completion_service; "
        "completion_service.ENCODE_S_MAX = 2.0"
    )
    started = RunningGateway.start(model_folder, tmp_path, tool_format="glm", prelude=prelude)
    with started as gateway:
        for definition, holds in (
            ('start: "unmistakable"', True),
            ("start: nowhere", False),
            ('start: %json {"type": "integer", "multipleOf": 9999991}', False),
        ):
            format_ = {"type": "grammar", "syntax": "lark", "definition": definition}
            tool = {"type": "custom", "name": "patch", "format": format_}
            fields = {"input": _INPUT, "tools": [tool], "store": False}
            status, body = _post(gateway, "/v1/responses", **fields)
            assert status == 200, body
            assert (gateway.scheduler.submitted[-1].grammar is not None) == holds


def test_formats_of_the_other_dialects_reach_the_scheduler_as_a_grammar(
    gateway: RunningGateway,
) -> None:
    """`text.format` of the Responses API and `output_config.format` of the Messages API."""
    wanted = {"type": "json_schema", "name": "x", "schema": _SCHEMA}
    first = _grammar(gateway, "/v1/responses", input="Hello", text={"format": wanted})
    second = _grammar(
        gateway,
        "/v1/messages",
        messages=_MESSAGES,
        max_tokens=20,
        output_config={"format": {"type": "json_schema", "schema": _SCHEMA}},
    )
    assert '"n"' in first.text
    assert first == second


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "root ::= root"}, "guided_grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_json": {"$ref": "http://127.0.0.1:1/"}}, "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"properties": {"x": {"items": {"not": {}}}}}},
                }
            },
            "response_format.json_schema.schema.properties.x.items",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {"properties": {"y": {"not": {}}}},
                            "strict": True,
                        },
                    }
                ]
            },
            "tools[0].function.parameters.properties.y",
        ),
    ],
)
def test_constraint_that_cannot_be_matched_is_refused_with_its_path(
    gateway: RunningGateway, fields: dict[str, Any], param: str
) -> None:
    """Nothing is sent to the scheduler; the error names the field, and in a schema the part."""
    before = len(gateway.scheduler.submitted)
    status, body = _post(gateway, "/v1/chat/completions", **fields)
    assert status == 400, body
    assert body["error"]["param"] == param, body
    assert len(gateway.scheduler.submitted) == before
