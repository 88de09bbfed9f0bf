"""The official `openai` client, unchanged, with the gateway."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from shared.messages import token_ids
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import reject_with, reply_with
from tests.gateway.tiny_tokenizer import completion_tokens, prompt_text

_TEXT = "Hello, how are you? 漢字 🎉"


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    """A client of the gateway; the scheduler replies with a sentence."""
    gateway.scheduler.reply = reply_with(completion_tokens(_TEXT))
    with openai.OpenAI(
        base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=20
    ) as opened:
        yield opened


def test_openai_client_reads_chat_choices_with_logprobs_and_usage(client: openai.OpenAI) -> None:
    """The client reads two choices with log probabilities and usage."""
    response = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        temperature=0.2,
        max_completion_tokens=50,
        logprobs=True,
        top_logprobs=2,
        n=2,
    )
    assert [choice.message.content for choice in response.choices] == [_TEXT] * 2
    assert response.choices[0].finish_reason == "stop"
    content = response.choices[0].logprobs
    assert content is not None
    assert content.content is not None
    assert bytes(content.content[0].bytes or []).decode() == content.content[0].token
    assert response.usage is not None
    assert response.usage.prompt_tokens_details is not None
    assert response.usage.prompt_tokens_details.cached_tokens == 4


def test_gateway_answers_next_request_that_contains_message_of_earlier_response(
    client: openai.OpenAI,
) -> None:
    """A client may send the message object of a response back in its next request."""
    first = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hello"}]
    )
    second = client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "user", "content": "Hello"},
            first.choices[0].message,  # type: ignore[list-item]
            {"role": "user", "content": "More"},
        ],
    )
    assert second.choices[0].message.content == _TEXT


def test_openai_client_reads_chat_stream_and_its_usage(client: openai.OpenAI) -> None:
    """The client reads the chunks of a stream and then its usage."""
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == _TEXT
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(completion_tokens(_TEXT))


def test_openai_client_stream_helper_collects_whole_text(client: openai.OpenAI) -> None:
    """The client's own accumulation of chunks gives the same text."""
    with client.chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "Hello"}]
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == _TEXT


_TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather <|im_end|>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def test_openai_client_reads_tool_calls_and_sends_their_results(
    client: openai.OpenAI, gateway: RunningGateway
) -> None:
    """Tool calls are objects, streamed or not, and the client can send them back with results."""
    gateway.scheduler.reply = reply_with(completion_tokens(f"I look.\n{_CALL}\n{_CALL}"))
    messages: list[Any] = [{"role": "user", "content": "How is Cologne?"}]
    response = client.chat.completions.create(model="tiny", messages=messages, tools=_TOOLS)
    choice = response.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    calls = choice.message.tool_calls or []
    assert [call.type for call in calls] == ["function"] * 2
    assert calls[0].type == "function"
    assert json.loads(calls[0].function.arguments) == {"city": "Köln"}
    submitted = gateway.scheduler.submitted[0]
    assert token_ids.unpack(submitted.prompt).count(2) == 2
    assert "weather" in prompt_text(submitted)
    with client.chat.completions.stream(model="tiny", messages=messages, tools=_TOOLS) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert [call.function.name for call in final.message.tool_calls or []] == ["weather"] * 2
    gateway.scheduler.reply = reply_with(completion_tokens("Rain."))
    messages += [choice.message]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
    second = client.chat.completions.create(model="tiny", messages=messages, tools=_TOOLS)
    assert second.choices[0].message.content == "Rain."


def test_tool_choice_none_hides_tools_from_model(
    client: openai.OpenAI, gateway: RunningGateway
) -> None:
    """With tool_choice none the model does not see the tools, and call text stays text."""
    gateway.scheduler.reply = reply_with(completion_tokens(_CALL))
    response = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        tools=_TOOLS,
        tool_choice="none",
    )
    assert response.choices[0].message.content == _CALL
    assert "weather" not in prompt_text(gateway.scheduler.submitted[0])


def test_openai_client_reads_text_completion_whole_and_streamed(client: openai.OpenAI) -> None:
    """The client reads /v1/completions, whole and streamed."""
    whole = client.completions.create(model="tiny", prompt="x", logprobs=2, echo=False)
    assert whole.choices[0].text == _TEXT
    assert whole.choices[0].logprobs is not None
    chunks = client.completions.create(model="tiny", prompt="x", stream=True, echo=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "x" + _TEXT


def test_openai_client_lists_and_retrieves_served_model(client: openai.OpenAI) -> None:
    """The client lists and retrieves the served model."""
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_openai_client_raises_exception_that_matches_each_error_status(
    client: openai.OpenAI, gateway: RunningGateway
) -> None:
    """Statuses and bodies become the client's exceptions with their fields."""
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], n=1_000
        )
    assert bad.value.param == "n"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="x", messages=[{"role": "user", "content": "x"}])
    assert missing.value.code == "model_not_found"
    gateway.scheduler.reply = reject_with("queue_full", "512 requests wait.", 3.0)
    with pytest.raises(openai.RateLimitError) as full:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
    assert full.value.response.headers["retry-after"] == "3"
