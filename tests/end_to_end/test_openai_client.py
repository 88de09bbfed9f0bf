"""The official OpenAI client against Lockstep with the demo model, on one rank and on two."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.end_to_end.running_lockstep import RunningLockstep, running_lockstep
from tests.support.waiting import wait_until

MODEL = "lockstep-demo"
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is Lockstep?"}]
COUNT: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Count from 1 to 40"}]


@pytest.fixture(scope="module", params=[1, 2])
def lockstep(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningLockstep]:
    """Lockstep with one rank, then with two."""
    with running_lockstep(tmp_path_factory.mktemp("run"), request.param) as running:
        yield running
        running.interrupt()
        assert running.wait() == 0


@pytest.fixture
def client(lockstep: RunningLockstep) -> Iterator[openai.OpenAI]:
    """The official client without retries, so that tests see each error."""
    address = f"http://127.0.0.1:{lockstep.port}/v1"
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


def create_chat_completion(
    client: openai.OpenAI, **options: object
) -> openai.types.chat.ChatCompletion:
    """Return a chat completion that is not streamed."""
    options = {"model": MODEL, "messages": QUESTION, "temperature": 0, **options}
    return client.chat.completions.create(**options)  # type: ignore[call-overload,no-any-return]


def scheduler_status(lockstep: RunningLockstep) -> dict[str, float]:
    """Return the scheduler's part of the status report."""
    connection = http.client.HTTPConnection("127.0.0.1", lockstep.port, timeout=10.0)
    connection.request("GET", "/v1/lockstep/status")
    answer: dict[str, float] = json.loads(connection.getresponse().read())["scheduler"]
    connection.close()
    return answer


def wait_until_idle(lockstep: RunningLockstep) -> None:
    """Wait until no request runs, waits, or holds KV cache. The report is at most a second old."""

    def is_idle() -> bool:
        report = scheduler_status(lockstep)
        return (report["running"], report["waiting"], report["kv_tokens_used"]) == (0, 0, 0)

    wait_until(is_idle, 15.0, poll_s=0.1, failure=lambda: scheduler_status(lockstep))


@pytest.mark.proof
def test_streamed_text_and_usage_equal_those_of_unstreamed_answer(client: openai.OpenAI) -> None:
    """The chunks of a stream join to the text of the unstreamed answer, and the usage is equal."""
    whole = create_chat_completion(client)
    text = whole.choices[0].message.content
    assert text is not None
    assert "one large language model" in text
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == text
    assert len(deltas) > 10
    usage = chunks[-1].usage
    assert usage is not None
    assert whole.usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    assert usage.model_copy(update={"prompt_tokens_details": None}) == whole.usage.model_copy(
        update={"prompt_tokens_details": None}
    )
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_request_with_seed_gives_same_text_as_single_choice_and_among_eight(
    client: openai.OpenAI,
) -> None:
    """A seed gives the same text when it is used again, also for the first of eight choices."""

    def generate(seed: int, n: int = 1) -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt="one two three", temperature=2, seed=seed, n=n, max_tokens=20
        )
        assert [choice.index for choice in answer.choices] == list(range(n))
        return [choice.text for choice in answer.choices]

    alone = generate(7)
    assert generate(7) == alone
    assert generate(8) != alone
    many = generate(7, n=8)
    assert many[0] == alone[0]
    assert len(set(many)) > 4


def test_each_token_has_requested_number_of_logprob_alternatives(client: openai.OpenAI) -> None:
    """Each token has its log probability and the requested number of alternatives."""
    answer = create_chat_completion(client, logprobs=True, top_logprobs=5, max_tokens=8)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 8
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 5
        assert entry.top_logprobs[0].token == entry.token, (
            "greedy sampling takes the most probable token"
        )
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob, abs=1e-4)
        assert entry.logprob <= 0.0
    text = b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode()
    assert answer.choices[0].message.content == text


def test_finish_reason_is_stop_at_stop_string_and_length_at_limit(client: openai.OpenAI) -> None:
    """A stop string ends the text before it with `stop`; the token limit ends it with `length`."""
    stopped = create_chat_completion(client, messages=COUNT, stop=[", 7"])
    assert stopped.choices[0].message.content == "1, 2, 3, 4, 5, 6"
    assert stopped.choices[0].finish_reason == "stop"
    cut = create_chat_completion(client, messages=COUNT, max_completion_tokens=9)
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage is not None
    assert cut.usage.completion_tokens == 9


def test_completions_endpoint_returns_text_and_usage(client: openai.OpenAI) -> None:
    """The older endpoint returns a text and its usage."""
    answer = client.completions.create(
        model=MODEL, prompt="Lockstep is", max_tokens=12, temperature=0, logprobs=2
    )
    assert answer.choices[0].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 12


def test_openai_client_raises_matching_exception_for_invalid_request(client: openai.OpenAI) -> None:
    """The client raises NotFoundError or BadRequestError with the gateway's sentence."""
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        create_chat_completion(client, model="no-such-model")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        create_chat_completion(client, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="tokens"):
        create_chat_completion(client, messages=[{"role": "user", "content": "word " * 20_000}])
    with pytest.raises(openai.BadRequestError, match="modalities"):
        create_chat_completion(client, modalities=["audio"])


def test_scheduler_runs_no_request_after_its_client_disconnected(
    client: openai.OpenAI, lockstep: RunningLockstep
) -> None:
    """Streams that are closed, and calls whose connection drops while they wait, are aborted."""
    for _ in range(3):
        stream = client.chat.completions.create(
            model=MODEL,
            messages=COUNT,
            stream=True,
            n=4,
            max_tokens=2_000,
            logit_bias={"2041": -100, "2042": -100, "2043": -100},
        )
        next(iter(stream))
        stream.close()
    body = json.dumps(
        {"model": MODEL, "messages": COUNT, "max_tokens": 4_000, "temperature": 1.0, "n": 2}
    )
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", lockstep.port)) as raw:
        raw.sendall((head + body).encode())
        time.sleep(0.3)
    wait_until_idle(lockstep)


@pytest.mark.proof
def test_sixteen_concurrent_requests_get_same_answers_as_sequential_requests(
    client: openai.OpenAI, lockstep: RunningLockstep
) -> None:
    """Concurrent requests with different prompts get the answers that they get one after the
    other."""
    words = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haze"] * 2
    prompts = [f"Repeat this text exactly:\n{word} {n} {word}" for n, word in enumerate(words)]

    def repeat(prompt: str) -> str:
        return (
            create_chat_completion(client, messages=[{"role": "user", "content": prompt}])
            .choices[0]
            .message.content
            or ""
        )

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(repeat, prompts))
    alone = [repeat(prompt) for prompt in prompts[:4]]
    assert together[:4] == alone
    assert (
        sum(
            answer == prompt.split("\n", 1)[1]
            for answer, prompt in zip(together, prompts, strict=True)
        )
        >= 15
    )
    wait_until_idle(lockstep)
