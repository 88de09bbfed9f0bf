"""The official `openai` client's Responses API, unchanged, with the gateway and a real store."""

import contextlib
import json
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from tests.cache_store.running_store import RunningStore
from tests.gateway.dialects.responses_requests import call
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import ready_status, reply_with
from tests.gateway.tiny_tokenizer import completion_tokens, prompt_text
from tests.support.waiting import wait_until

TEXT = "Hello, how are you? 漢字 🎉"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS: list[Any] = [{**WEATHER, "strict": False}]
KEYS = {"LOCKSTEP_API_KEYS": "anna=" + "a" * 40 + ",ben=" + "b" * 40}


@pytest.fixture(scope="module")
def store() -> Iterator[RunningStore]:
    """A real cache store process, in a folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="ls-") as folder:
        running = RunningStore(Path(folder))
        running.start()
        yield running
        running.close()


@pytest.fixture(scope="module")
def stored_gateway(model_folder: Path, store: RunningStore) -> Iterator[RunningGateway]:
    """A gateway with two API keys beside the cache store."""
    wait_until((store.run_dir / "store.sock").exists, 30.0, failure="the store does not listen")
    report = ready_status(context_tokens_max=4_096)
    started = RunningGateway.start(
        model_folder, store.run_dir, report=report, environment=KEYS, has_store=True
    )
    with started as running:
        running.scheduler.reply = reply_with(completion_tokens(TEXT))
        yield running


def client_of(gateway: RunningGateway, name: str) -> openai.OpenAI:
    """Return a client with the API key of this name."""
    return openai.OpenAI(
        base_url=f"{gateway.url}/v1", api_key=name[0] * 40, max_retries=0, timeout=20
    )


@pytest.fixture
def client(stored_gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    """Anna's client; the scheduler replies with a sentence."""
    stored_gateway.scheduler.reset()
    stored_gateway.scheduler.status = ready_status(context_tokens_max=4_096)
    stored_gateway.scheduler.reply = reply_with(completion_tokens(TEXT))
    with client_of(stored_gateway, "anna") as opened:
        yield opened


def wait_for_store(client: openai.OpenAI) -> None:
    """Wait until the gateway keeps responses."""

    def keeps() -> bool:
        return client.responses.create(model="tiny", input="Hi").model_dump()["store"] is True

    wait_until(keeps, 20.0, poll_s=0.2, failure="the gateway keeps no responses")


def test_openai_client_reads_whole_response_and_its_usage(
    client: openai.OpenAI, stored_gateway: RunningGateway
) -> None:
    """Text, counts and repeated fields are where the client looks for them."""
    response = client.responses.create(
        model="tiny",
        input="Hello",
        instructions="Be kind.",
        temperature=0.2,
        max_output_tokens=100,
        metadata={"a": "b"},
        store=False,
    )
    assert response.output_text == TEXT
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.output_tokens == len(completion_tokens(TEXT))
    assert response.usage.input_tokens_details.cached_tokens == 4
    assert response.metadata == {"a": "b"}
    assert prompt_text(stored_gateway.scheduler.submitted[-1]).startswith(
        "<|im_start|>system\nBe kind.<|im_end|>"
    )
    assert stored_gateway.scheduler.submitted[-1].sampling.temperature == 0.2


def test_openai_client_streams_text_and_collects_the_same_response(client: openai.OpenAI) -> None:
    """The client's own accumulation of events gives the response of the last event."""
    with client.responses.stream(model="tiny", input="Hello", store=False) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == TEXT == final.output_text
    assert events[-1].type == "response.completed"
    whole = client.responses.create(model="tiny", input="Hello", store=False)
    assert whole.output_text == final.output_text
    assert whole.usage == final.usage


def test_openai_client_reads_tool_calls_and_sends_their_results(
    client: openai.OpenAI, stored_gateway: RunningGateway
) -> None:
    """A call is an item with arguments, streamed or whole, and its result continues the turn."""
    stored_gateway.scheduler.reply = reply_with(
        completion_tokens("I look.\n" + call("weather", city="Köln"))
    )
    items: list[Any] = [{"role": "user", "content": "How is Cologne?"}]
    response = client.responses.create(model="tiny", input=items, tools=TOOLS, store=False)
    message, found = response.output
    assert message.type == "message"
    assert found.type == "function_call"
    assert json.loads(found.arguments) == {"city": "Köln"}
    with client.responses.stream(model="tiny", input=items, tools=TOOLS, store=False) as stream:
        streamed = stream.get_final_response().output[1]
    assert streamed.type == "function_call"
    assert streamed.arguments == found.arguments
    items += [one.model_dump() for one in response.output]
    items.append({"type": "function_call_output", "call_id": found.call_id, "output": "Rain."})
    stored_gateway.scheduler.reply = reply_with(completion_tokens("It rains."))
    answer = client.responses.create(model="tiny", input=items, tools=TOOLS, store=False)
    assert answer.output_text == "It rains."
    assert "<|im_start|>tool\nRain." in prompt_text(stored_gateway.scheduler.submitted[-1])


def test_openai_client_reads_log_probabilities(client: openai.OpenAI) -> None:
    """With `include` every token of the text has its log probability."""
    response = client.responses.create(
        model="tiny",
        input="Hello",
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        max_output_tokens=200,
        store=False,
    )
    [message] = response.output
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(bytes(one.bytes).decode(errors="ignore") for one in part.logprobs)
    assert len(part.logprobs) == len(completion_tokens(TEXT)) - 1
    assert len(part.logprobs[0].top_logprobs) == 2


def test_log_probabilities_stand_in_the_text_before_and_after_a_call(
    client: openai.OpenAI, stored_gateway: RunningGateway
) -> None:
    """With tools, each text has those of its tokens and a call has none, streamed and whole."""
    text = "I look." + call("weather", city="Köln") + "Done: 漢字"
    stored_gateway.scheduler.reply = reply_with(completion_tokens(text))
    fields: dict[str, Any] = {
        "model": "tiny",
        "input": "Hello",
        "tools": TOOLS,
        "include": ["message.output_text.logprobs"],
        "store": False,
    }
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        streamed = stream.get_final_response()

    found = []
    for response in (whole, streamed):
        before, made_call, after = response.model_dump()["output"]
        assert made_call["type"] == "function_call"
        parts = [message["content"][0] for message in (before, after)]
        assert [part["text"] for part in parts] == ["I look.", "Done: 漢字"]
        found.append([part["logprobs"] for part in parts])
    assert found[0] == found[1]
    texts = [b"".join(bytes(one["bytes"]) for one in logprobs) for logprobs in found[0]]
    assert [text.decode() for text in texts] == ["I look.", "Done: 漢字"]


def test_openai_client_counts_the_tokens_of_a_prompt(client: openai.OpenAI) -> None:
    """The count is that of the response to the same request."""
    counted = client.responses.input_tokens.count(model="tiny", input="Hello", tools=TOOLS)
    made = client.responses.create(model="tiny", input="Hello", tools=TOOLS, store=False)
    assert made.usage is not None
    assert counted.input_tokens == made.usage.input_tokens


class Weather(pydantic.BaseModel):
    """The answer that a test asks for."""

    city: str
    degrees: int


def test_openai_client_parses_an_answer_that_matches_its_schema(
    client: openai.OpenAI, stored_gateway: RunningGateway
) -> None:
    """The schema of `text.format` reaches the ranks as a grammar, and the client reads its type."""
    stored_gateway.scheduler.reply = reply_with(completion_tokens('{"city": "Köln", "degrees": 7}'))
    response = client.responses.parse(model="tiny", input="Hello", text_format=Weather, store=False)
    assert response.output_parsed == Weather(city="Köln", degrees=7)
    grammar = stored_gateway.scheduler.submitted[-1].grammar
    assert grammar is not None
    assert "degrees" in grammar.text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_required_call_reaches_the_ranks_as_a_grammar(
    client: openai.OpenAI, stored_gateway: RunningGateway, choice: Any
) -> None:
    """A call that must be made is enforced in the model's own format of calls."""
    stored_gateway.scheduler.reply = reply_with(completion_tokens(call("weather", city="Rom")))
    response = client.responses.create(
        model="tiny", input="Hello", tools=TOOLS, tool_choice=choice, store=False
    )
    assert [item.type for item in response.output] == ["function_call"]
    grammar = stored_gateway.scheduler.submitted[-1].grammar
    assert grammar is not None
    assert "weather" in grammar.text


def test_response_without_parallel_calls_ends_after_its_first_call(
    client: openai.OpenAI, stored_gateway: RunningGateway
) -> None:
    """`parallel_tool_calls` false is one call at most."""
    stored_gateway.scheduler.reply = reply_with(completion_tokens(call("weather", city="Rom") * 2))
    response = client.responses.create(
        model="tiny", input="Hello", tools=TOOLS, parallel_tool_calls=False, store=False
    )
    assert [item.type for item in response.output] == ["function_call"]


def test_response_cut_off_by_max_output_tokens_is_incomplete(client: openai.OpenAI) -> None:
    """The client learns that the answer is not whole."""
    response = client.responses.create(
        model="tiny", input="Hello", max_output_tokens=2, store=False
    )
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_stored_response_continues_a_conversation(
    client: openai.OpenAI, stored_gateway: RunningGateway
) -> None:
    """A request that names the response before it needs only new items."""
    wait_for_store(client)
    stored_gateway.scheduler.reply = reply_with(completion_tokens(call("weather", city="Rom")))
    first = client.responses.create(
        model="tiny", input="Question one", instructions="Once.", tools=TOOLS
    )
    [found] = first.output
    assert found.type == "function_call"
    stored_gateway.scheduler.reply = reply_with(completion_tokens("It rains."))
    second = client.responses.create(
        model="tiny",
        input=[{"type": "function_call_output", "call_id": found.call_id, "output": "Rain."}],
        previous_response_id=first.id,
        tools=TOOLS,
    )
    third = client.responses.create(
        model="tiny", input="Question two", previous_response_id=second.id
    )
    assert third.previous_response_id == second.id
    shown = prompt_text(stored_gateway.scheduler.submitted[-1])
    parts = ["Question one", "Rain.", "It rains.", "Question two"]
    assert sorted(parts, key=shown.index) == parts
    assert "Once." not in shown


def test_stored_response_can_be_read_listed_and_deleted(
    client: openai.OpenAI, store: RunningStore
) -> None:
    """GET returns the sent response; after DELETE it is gone."""
    wait_for_store(client)
    with client.responses.stream(model="tiny", input="Question") as stream:
        made = stream.get_final_response()
    read = client.responses.retrieve(made.id)
    assert read.output_text == TEXT
    assert read.usage == made.usage
    items = client.responses.input_items.list(made.id)
    [item] = list(items)
    assert item.type == "message"
    assert item.id
    assert "\n  documents  " in store.cache("stats").stdout
    client.responses.delete(made.id)
    for use in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            use(made.id)
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(model="tiny", input="x", previous_response_id=made.id)
    assert refused.value.param == "previous_response_id"


def test_item_references_stand_for_stored_items(
    client: openai.OpenAI, stored_gateway: RunningGateway
) -> None:
    """A client may name an item of an earlier response instead of sending it."""
    wait_for_store(client)
    first = client.responses.create(model="tiny", input="Question one")
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    client.responses.create(
        model="tiny", input=[reference, {"role": "user", "content": "Question two"}]
    )
    assert TEXT in prompt_text(stored_gateway.scheduler.submitted[-1])
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(
            model="tiny", input=[{"type": "item_reference", "id": "msg_00ff_0"}]
        )
    assert refused.value.param == "input[0].id"


def test_response_is_stored_for_its_own_key_only(
    client: openai.OpenAI, stored_gateway: RunningGateway
) -> None:
    """Another key finds nothing and deletes nothing."""
    wait_for_store(client)
    made = client.responses.create(model="tiny", input="Secret")
    with client_of(stored_gateway, "ben") as other:
        for use in (other.responses.retrieve, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                use(made.id)
    assert client.responses.retrieve(made.id).id == made.id


def test_stored_responses_survive_a_killed_store_and_requests_need_no_store(
    client: openai.OpenAI, stored_gateway: RunningGateway, store: RunningStore
) -> None:
    """Without a store, responses are made and not kept; with it again, earlier ones are there."""
    wait_for_store(client)
    made = client.responses.create(model="tiny", input="Question")
    assert client.responses.retrieve(made.id).id == made.id
    store.kill()

    def is_off() -> bool:
        return client.responses.create(model="tiny", input="Hi").model_dump()["store"] is False

    wait_until(is_off, 30.0, poll_s=0.3, failure="the gateway has not noticed")
    with pytest.raises(openai.InternalServerError) as refused:
        client.responses.create(model="tiny", input="x", store=True)
    assert refused.value.status_code == 503
    store.start()
    wait_for_store(client)
    assert client.responses.retrieve(made.id).output_text == TEXT


def test_stored_documents_that_clients_do_not_read_count_as_memory_of_their_tenant(
    stored_gateway: RunningGateway, client: openai.OpenAI
) -> None:
    """Requests for stored items stop at the tenant's share of memory, and others are served."""
    ignored: list[Any] = [{"type": "unknown", "content": "x" * 15_000_000}]
    hello: list[Any] = [{"role": "user", "content": "Hello"}]
    made = client.responses.create(model="tiny", input=ignored + hello)
    client.responses.retrieve(made.id)
    statuses: list[bytes] = []
    with contextlib.ExitStack() as open_connections:
        for _ in range(15):
            connection = open_connections.enter_context(socket.socket())
            # The kernel must not take a whole document.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            connection.connect(("127.0.0.1", stored_gateway.port))
            head = (
                f"GET /v1/responses/{made.id}/input_items HTTP/1.1\r\nHost: localhost\r\n"
                f"Authorization: Bearer {'a' * 40}\r\n\r\n"
            )
            connection.sendall(head.encode())
            statuses.append(connection.recv(12)[-3:])
        assert statuses == [b"200"] * 12 + [b"429"] * 3
        with client_of(stored_gateway, "ben") as other:
            assert other.responses.create(model="tiny", input="Hi").output_text == TEXT
    client.responses.delete(made.id)


@pytest.mark.parametrize(
    "path", ["/v1/responses/..%2f..%2fsecret", "/v1/responses/" + "x" * 500, "/v1/responses/resp_1"]
)
def test_unknown_ids_are_404(stored_gateway: RunningGateway, path: str) -> None:
    """An id that names nothing, or no document at all, is not found."""
    headers = {"Authorization": "Bearer " + "a" * 40}
    status, body = stored_gateway.get(path, headers)
    assert (status, json.loads(body)["error"]["code"]) == (404, "not_found")
