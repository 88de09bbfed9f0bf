"""Fields of chat requests that change the prompt, the order of requests or the end of an answer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.gateway.dialects.openai.validation import TEXT_TOKENS_DEFAULT
from services.gateway.endpoints.answer_length import LOGPROB_ENTRIES_MAX
from shared.messages import token_ids
from tests.gateway import tiny_tokenizer
from tests.gateway.running_gateway import FORGET_FULL_QUEUE, RunningGateway
from tests.gateway.scripted_scheduler import ready_status, reply_with
from tests.gateway.tiny_tokenizer import completion_tokens, prompt_text
from tests.support.waiting import wait_until

CONTEXT_TOKENS = 100_000
_TEMPLATE = (
    "{%- if tools %}{{- 'Call <tool_call>: ' + (tools | tojson) }}{%- endif %}"
    "{{- 'effort=' + (reasoning_effort | default('none given')) }}"
    "{{- ' thinking=' + (enable_thinking | default('none given') | string) }}"
    "{{- ' style=' + (style | default({}) | tojson) }}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.reasoning_content %}{{- '(' + message.reasoning_content + ')' }}{%- endif %}"
    "{{- message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
)
_CALL = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
_TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def thinking_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """A gateway whose chat template writes its arguments out."""
    folder: Path = tiny_tokenizer.write_model_folder(tmp_path_factory.mktemp("thinking"))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": _TEMPLATE}))
    run_dir = tmp_path_factory.mktemp("run")
    with RunningGateway.start(folder, run_dir, prelude=FORGET_FULL_QUEUE) as running:
        yield running


def _prompt(gateway: RunningGateway, **fields: Any) -> str:
    """Return the prompt of a chat request."""
    gateway.scheduler.reset()
    status, body = gateway.chat(**fields)
    assert status == 200, body
    return prompt_text(gateway.scheduler.submitted[-1])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "effort=none given thinking=none given"),
        ({"reasoning_effort": "low"}, "effort=low thinking=none given"),
        ({"reasoning_effort": "minimal"}, "effort=low"),
        ({"reasoning_effort": "xhigh"}, "effort=high"),
        ({"reasoning_effort": "none"}, "effort=none given thinking=False"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "thinking=True"),
        ({"chat_template_kwargs": {"style": {"a": [1]}}}, 'style={"a": [1]}'),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "own"}},
            "effort=own",
        ),
    ],
)
def test_effort_and_template_arguments_reach_the_chat_template(
    thinking_gateway: RunningGateway, fields: dict[str, Any], expected: str
) -> None:
    """Every argument of a template can be set; efforts that few templates know are mapped."""
    assert expected in _prompt(thinking_gateway, **fields)


def test_reasoning_of_earlier_turns_is_accepted_under_both_names(
    thinking_gateway: RunningGateway,
) -> None:
    """Clients send back the field that they know."""
    for name in ("reasoning_content", "reasoning"):
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", name: "thought"},
            {"role": "user", "content": "c"},
        ]
        assert "(thought)b" in _prompt(thinking_gateway, messages=messages)


def test_special_token_in_template_argument_is_refused(thinking_gateway: RunningGateway) -> None:
    """Only the template can write special tokens, whichever field a text comes from."""
    for value in ("<|im_end|>", {"<|im_start|>": 1}, ["a<|im_start|>b"]):
        status, body = thinking_gateway.chat(chat_template_kwargs={"style": value})
        assert (status, body["error"]["param"]) == (400, "chat_template_kwargs")


def test_developer_message_is_a_system_message(gateway: RunningGateway) -> None:
    """OpenAI's newer role means the same."""
    messages = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "x"}]
    assert "<|im_start|>system\nBe kind." in _prompt(gateway, messages=messages)


@pytest.mark.parametrize(
    ("tier", "priority"),
    [("priority", 1), ("flex", -1), ("auto", 0), ("default", 0), ("scale", 0), (None, 0)],
)
def test_service_tier_orders_requests_of_one_client(
    gateway: RunningGateway, tier: str | None, priority: int
) -> None:
    """A tier changes the order among the client's own requests only."""
    assert gateway.chat(service_tier=tier)[0] == 200
    assert gateway.scheduler.submitted[-1].priority == priority


def test_max_completion_tokens_bounds_the_answer(gateway: RunningGateway) -> None:
    """OpenAI's newer name of max_tokens has its effect."""
    assert gateway.chat(max_completion_tokens=7)[0] == 200
    assert gateway.scheduler.submitted[-1].max_tokens == 7


@pytest.fixture
def roomy_gateway(gateway: RunningGateway) -> Iterator[RunningGateway]:
    """The gateway while its model has a long context."""
    usual_tokens = _context(gateway)
    gateway.scheduler.status = ready_status(context_tokens_max=CONTEXT_TOKENS)
    wait_until(lambda: _context(gateway) == CONTEXT_TOKENS, 10.0)
    yield gateway
    gateway.scheduler.reset()
    wait_until(lambda: _context(gateway) == usual_tokens, 10.0)


def _context(gateway: RunningGateway) -> int:
    _, body = gateway.get("/v1/models")
    context: int = json.loads(body)["data"][0]["max_model_len"]
    return context


def _room(gateway: RunningGateway) -> int:
    """Return the tokens that the latest prompt leaves in the context."""
    return CONTEXT_TOKENS - len(token_ids.unpack(gateway.scheduler.submitted[-1].prompt))


@pytest.mark.parametrize("fields", [{}, {"max_tokens": -1}, {"max_completion_tokens": -1}])
def test_answer_may_fill_the_context_if_nothing_limits_it(
    roomy_gateway: RunningGateway, fields: dict[str, Any]
) -> None:
    """Editors that set no limit write whole files; -1 is what clients of llama.cpp send."""
    gateway = roomy_gateway
    for count in (1, 2):
        assert gateway.chat(**fields, n=count)[0] == 200
        assert gateway.scheduler.submitted[-1].max_tokens == _room(gateway)
    assert gateway.chat(**fields, logprobs=True, top_logprobs=20)[0] == 200
    assert gateway.scheduler.submitted[-1].max_tokens == LOGPROB_ENTRIES_MAX // 21
    limit = next(iter(fields.values()), None)
    text = {"model": "tiny", "prompt": "x", "max_tokens": limit}
    assert gateway.post("/v1/completions", text)[0] == 200
    assert gateway.scheduler.submitted[-1].max_tokens == TEXT_TOKENS_DEFAULT
    response = {"model": "tiny", "input": "x", "store": False, "max_output_tokens": limit}
    assert gateway.post("/v1/responses", response)[0] == 200
    assert gateway.scheduler.submitted[-1].max_tokens == _room(gateway)


@pytest.mark.parametrize(
    ("stop", "kept"), [("", []), ([], []), ([""], []), (["", "a", "a", "b"], ["a", "b"])]
)
def test_empty_stop_strings_have_no_effect(
    gateway: RunningGateway, stop: str | list[str], kept: list[str]
) -> None:
    """Clients send an empty field where the user has set none."""
    gateway.scheduler.reply = reply_with(completion_tokens("x a b"))
    _, body = gateway.chat(stop=stop)
    assert body["choices"][0]["message"]["content"] == ("x " if kept else "x a b")


@pytest.mark.parametrize("top_k", [None, 0, 40])
def test_top_p_of_zero_takes_the_most_likely_token(
    gateway: RunningGateway, top_k: int | None
) -> None:
    """As in OpenAI's API: no tokens but the first are left to sample from."""
    assert gateway.chat(top_p=0, top_k=top_k)[0] == 200
    sampling = gateway.scheduler.submitted[-1].sampling
    assert (sampling.top_p, sampling.top_k) == (1.0, 1)
    body = {"max_tokens": 9, "top_p": 0, "messages": [{"role": "user", "content": "x"}]}
    assert gateway.post("/v1/messages", {"model": "tiny", **body})[0] == 200
    assert gateway.scheduler.submitted[-1].sampling.top_k == 1


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 513}, {"messages": [{"role": "user", "content": "word " * 600}]}]
)
def test_too_long_request_is_refused_in_the_words_that_litellm_reads(
    gateway: RunningGateway, fields: dict[str, Any]
) -> None:
    """Aider shortens a conversation only if litellm finds one of its sentences in the error."""
    status, body = gateway.chat(**fields)
    error = body["error"]
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "this model's maximum context length is 512 tokens" in error["message"].lower()


_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
_EARLIER_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "shown", "ignored"),
    [
        ({"content": None, "reasoning_content": "thought"}, "(thought)<|im_end|>", set()),
        ({"content": None}, "assistant\n<|im_end|>", set()),
        (
            {"content": [], "tool_calls": [_EARLIER_CALL]},
            'assistant\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>',
            set(),
        ),
        (
            {"content": [{"type": "thinking", "thinking": "h"}, {"type": "text", "text": "said"}]},
            "assistant\nsaid<|im_end|>",
            {"messages.content.thinking"},
        ),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "assistant\nNo.<|im_end|>", set()),
        (
            {"content": [{"type": "output_text", "text": "b"}, _IMAGE]},
            "assistant\nb[image_url left out: this model reads only text]<|im_end|>",
            {"messages.content.image_url"},
        ),
    ],
)
def test_any_turn_of_the_assistant_can_be_sent_back(
    thinking_gateway: RunningGateway, message: dict[str, Any], shown: str, ignored: set[str]
) -> None:
    """History cannot be taken back by the client, so that a refusal would end the session."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", **message},
        {"role": "user", "content": "b"},
    ]
    assert shown in _prompt(thinking_gateway, messages=messages)
    body = {"model": "tiny", "messages": messages}
    headers = thinking_gateway.post("/v1/chat/completions", body)[2]
    assert set(headers.get("x-lockstep-ignored", "").split(", ")) - {""} == ignored


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (None, "tool\n<|im_end|>"),
        ([], "tool\n<|im_end|>"),
        ([_IMAGE], "tool\n[image_url left out: this model reads only text]<|im_end|>"),
        ([{"type": "mystery"}, {"type": "text", "text": "r"}], "tool\nr<|im_end|>"),
    ],
)
def test_any_result_of_a_tool_can_be_sent_back(
    thinking_gateway: RunningGateway, content: object, shown: str
) -> None:
    """A tool may return an image or nothing, whether the model can read it or not."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [_EARLIER_CALL]},
        {"role": "tool", "tool_call_id": "a", "content": content},
    ]
    assert shown in _prompt(thinking_gateway, messages=messages)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_answer_ends_after_first_call_without_parallel_calls(
    gateway: RunningGateway, is_streamed: bool
) -> None:
    """With parallel_tool_calls false a second call is neither sent nor generated further."""
    gateway.scheduler.reply = reply_with(completion_tokens(f"{_CALL}{_CALL} and text"))
    fields: dict[str, Any] = {"tools": _TOOLS, "parallel_tool_calls": False}
    messages = [{"role": "user", "content": "x"}]
    if is_streamed:
        events = gateway.stream("/v1/chat/completions", {"messages": messages, **fields})
        assert events.pop() == "[DONE]"
        choices = [event["choices"][0] for event in events if isinstance(event, dict)]
        calls = [call for one in choices for call in one["delta"].get("tool_calls", [])]
        assert {call["index"] for call in calls} == {0}
        assert choices[-1]["finish_reason"] == "tool_calls"
    else:
        _, body = gateway.chat(**fields)
        message = body["choices"][0]["message"]
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]
        assert message["content"] is None
        assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert gateway.scheduler.wait_aborts(1)[0].reason == "stop"
    _, both = gateway.chat(tools=_TOOLS)
    assert len(both["choices"][0]["message"]["tool_calls"]) == 2
