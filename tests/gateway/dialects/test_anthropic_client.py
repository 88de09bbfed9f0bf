"""The official `anthropic` client, unchanged, with the gateway."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from shared.messages import CachedPrefix
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import ready_status, reject_with, reply_with
from tests.gateway.tiny_tokenizer import completion_tokens, prompt_text

_TEXT = "Hello, how are you? 漢字 🎉"
_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
_TOOLS: list[Any] = [
    {
        "name": "weather",
        "description": "Tells the weather.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
_HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[anthropic.Anthropic]:
    """A client of the gateway; the scheduler replies with a sentence."""
    gateway.scheduler.reply = reply_with(completion_tokens(_TEXT))
    with anthropic.Anthropic(
        base_url=gateway.url, api_key="unused", max_retries=0, timeout=20
    ) as opened:
        yield opened


def test_anthropic_client_reads_whole_message_with_usage(
    client: anthropic.Anthropic, gateway: RunningGateway
) -> None:
    """The client reads text, stop reason and counts, and the sampling reaches the scheduler."""
    message = client.messages.create(
        model="tiny",
        max_tokens=100,
        messages=_HELLO,
        system="Be kind.",
        # Newer versions of the client have no arguments for them.
        extra_body={"temperature": 0.5, "top_k": 7},
    )
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].type == "text"
    assert message.content[0].text == _TEXT
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.model, message.role, message.type) == ("tiny", "assistant", "message")
    assert message.id.startswith("msg_")
    submitted = gateway.scheduler.submitted[-1]
    assert message.usage.cache_read_input_tokens == 4
    assert message.usage.input_tokens == submitted.prompt_tokens - 4
    assert message.usage.output_tokens == len(completion_tokens(_TEXT))
    assert (submitted.sampling.temperature, submitted.sampling.top_k) == (0.5, 7)
    assert "<|im_start|>system\nBe kind.<|im_end|>" in prompt_text(gateway.scheduler.submitted[-1])


def test_anthropic_client_collects_same_message_from_stream(client: anthropic.Anthropic) -> None:
    """The client's own accumulation of events gives the whole message."""
    whole = client.messages.create(model="tiny", max_tokens=100, messages=_HELLO)
    with client.messages.stream(model="tiny", max_tokens=100, messages=_HELLO) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == _TEXT
    assert final.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})


def test_anthropic_client_runs_a_tool_and_sends_its_result(
    client: anthropic.Anthropic, gateway: RunningGateway
) -> None:
    """A tool call is a block with an object, streamed or not, and its result continues."""
    gateway.scheduler.reply = reply_with(completion_tokens(f"I look.\n{_CALL}"))
    messages: list[Any] = [{"role": "user", "content": "How is Cologne?"}]
    whole = client.messages.create(model="tiny", max_tokens=100, messages=messages, tools=_TOOLS)
    with client.messages.stream(
        model="tiny", max_tokens=100, messages=messages, tools=_TOOLS
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_message()
    for message in (whole, final):
        assert message.stop_reason == "tool_use"
        assert [block.type for block in message.content] == ["text", "tool_use"]
        used = message.content[1]
        assert used.type == "tool_use"
        assert (used.name, used.input) == ("weather", {"city": "Köln", "days": 2})
    [call_id] = (block.id for block in final.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call_id, "content": "Rain."}
    messages += [
        {"role": "assistant", "content": final.content},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    gateway.scheduler.reply = reply_with(completion_tokens("Wet."))
    answer = client.messages.create(model="tiny", max_tokens=9, messages=messages, tools=_TOOLS)
    assert answer.content[0].type == "text"
    assert "tool\nRain.<|im_end|>\n<|im_start|>user\nSo?" in prompt_text(
        gateway.scheduler.submitted[-1]
    )


def test_answer_ends_after_first_call_when_parallel_calls_are_disabled(
    client: anthropic.Anthropic, gateway: RunningGateway
) -> None:
    """`disable_parallel_tool_use` is kept: what follows the first call is not sent."""
    gateway.scheduler.reply = reply_with(completion_tokens(f"{_CALL}\n{_CALL} end"))
    message = client.messages.create(
        model="tiny",
        max_tokens=200,
        messages=_HELLO,
        tools=_TOOLS,
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    assert [block.type for block in message.content] == ["tool_use"]
    assert message.stop_reason == "tool_use"
    gateway.scheduler.wait_aborts(1)


def test_stop_sequence_is_named_in_the_answer(client: anthropic.Anthropic) -> None:
    """The stop sequence that ended the text is in the message, and so is its reason."""
    message = client.messages.create(
        model="tiny", max_tokens=100, messages=_HELLO, stop_sequences=["how", "you"]
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "how")
    assert message.content[0].type == "text"
    assert message.content[0].text == "Hello, "


def test_max_tokens_is_reduced_to_the_room_that_is_left(
    client: anthropic.Anthropic, gateway: RunningGateway
) -> None:
    """Claude Code asks for 32,000 tokens, also where the window is smaller."""
    client.messages.create(model="tiny", max_tokens=1_000_000, messages=_HELLO)
    submitted = gateway.scheduler.submitted[-1]
    assert submitted.max_tokens == 512 - submitted.prompt_tokens


def test_anthropic_client_counts_tokens_of_exactly_the_prompt(
    client: anthropic.Anthropic, gateway: RunningGateway
) -> None:
    """The count is the length of the prompt that the same request would have."""
    fields: dict[str, Any] = {"messages": _HELLO, "tools": _TOOLS, "system": "Be kind."}
    counted = client.messages.count_tokens(model="tiny", **fields)
    assert gateway.scheduler.submitted == []
    client.messages.create(model="tiny", max_tokens=9, **fields)
    assert counted.input_tokens == gateway.scheduler.submitted[-1].prompt_tokens


def test_usage_counts_new_tokens_of_the_cache_apart_when_the_request_marks_them(
    client: anthropic.Anthropic, gateway: RunningGateway
) -> None:
    """With cache_control, full blocks that were computed count as created; all counts add up."""
    gateway.scheduler.reply = reply_with([40, 2], cached=CachedPrefix(memory_tokens=32))
    system: Any = [{"type": "text", "text": "word " * 60, "cache_control": {"type": "ephemeral"}}]
    usage = client.messages.create(model="tiny", max_tokens=9, messages=_HELLO, system=system).usage
    prompt_tokens = gateway.scheduler.submitted[-1].prompt_tokens
    assert usage.cache_read_input_tokens == 32
    assert usage.cache_creation_input_tokens == prompt_tokens // 32 * 32 - 32
    assert usage.input_tokens == prompt_tokens % 32


def test_anthropic_client_lists_and_retrieves_models(client: anthropic.Anthropic) -> None:
    """The client reads the list of models and one model in Anthropic's form."""
    page = client.models.list(limit=1_000)
    assert [model.id for model in page.data] == ["tiny"]
    assert client.models.retrieve("tiny").display_name == "tiny"


def test_anthropic_client_raises_exception_that_matches_each_error(
    client: anthropic.Anthropic, gateway: RunningGateway
) -> None:
    """Statuses and bodies become the client's exceptions, with the texts that agents parse."""
    with pytest.raises(anthropic.BadRequestError) as long:
        client.messages.create(
            model="tiny", max_tokens=9, messages=[{"role": "user", "content": "long " * 600}]
        )
    body: Any = long.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    words = body["error"]["message"].split()
    assert words[:4] == ["prompt", "is", "too", "long:"]
    assert (words[5:7], words[7:]) == (["tokens", ">"], ["511", "maximum"])
    assert int(words[4]) > 511
    assert body["request_id"] == long.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=9, messages=_HELLO)
    gateway.scheduler.reply = reject_with("queue_full", "512 requests wait.", 3.0)
    with pytest.raises(anthropic.RateLimitError) as full:
        client.messages.create(model="tiny", max_tokens=9, messages=_HELLO)
    assert full.value.response.headers["retry-after"] == "3"
    gateway.scheduler.status = ready_status(ready=False, reason="the world is starting")
    gateway.scheduler.reply = reject_with("draining", "The server is shutting down.")
    with pytest.raises(anthropic.APIStatusError) as overloaded:
        client.messages.create(model="tiny", max_tokens=9, messages=_HELLO)
    assert overloaded.value.status_code == 529
    assert overloaded.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
    assert "retry-after" in overloaded.value.response.headers
