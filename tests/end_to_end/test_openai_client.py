"""The official client, unchanged, against the whole stack on the demo model: one rank, then two."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.end_to_end.running_lockstep import RunningLockstep

MODEL = "lockstep-demo"
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is Lockstep?"}]
COUNT: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Count from 1 to 40"}]


@pytest.fixture(scope="module", params=[1, 2])
def lockstep(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningLockstep]:
    """Lockstep with one rank, then with two."""
    running = RunningLockstep(tmp_path_factory.mktemp("run"), request.param)
    try:
        running.wait_until_ready()
        yield running
        running.interrupt()
        assert running.wait() == 0
    finally:
        running.close()


@pytest.fixture
def client(lockstep: RunningLockstep) -> Iterator[openai.OpenAI]:
    """The official client; it never retries, so that each error is seen."""
    address = f"http://127.0.0.1:{lockstep.port}/v1"
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


def ask(client: openai.OpenAI, **options: object) -> openai.types.chat.ChatCompletion:
    """Ask and return the whole answer."""
    options = {"model": MODEL, "messages": QUESTION, "temperature": 0, **options}
    return client.chat.completions.create(**options)  # type: ignore[call-overload,no-any-return]


def status(lockstep: RunningLockstep) -> dict[str, float]:
    """Return the scheduler's report."""
    connection = http.client.HTTPConnection("127.0.0.1", lockstep.port, timeout=10.0)
    connection.request("GET", "/v1/lockstep/status")
    answer: dict[str, float] = json.loads(connection.getresponse().read())["scheduler"]
    connection.close()
    return answer


def wait_until_idle(lockstep: RunningLockstep) -> None:
    """Wait until no request holds anything. The report is a second old at most."""
    until_s = time.monotonic() + 15.0
    while True:
        report = status(lockstep)
        if (report["running"], report["waiting"], report["kv_tokens_used"]) == (0, 0, 0):
            return
        assert time.monotonic() < until_s, report
        time.sleep(0.1)


@pytest.mark.proof
def test_stream_and_whole_answer_are_the_same_text(client: openai.OpenAI) -> None:
    """Streaming changes how an answer arrives, not what it says; usage is right in both."""
    whole = ask(client)
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


def test_a_seed_repeats_and_neighbours_do_not_matter(client: openai.OpenAI) -> None:
    """The same seed draws the same text, alone or as one of eight choices drawn beside others."""

    def draw(seed: int, n: int = 1) -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt="one two three", temperature=2, seed=seed, n=n, max_tokens=20
        )
        assert [choice.index for choice in answer.choices] == list(range(n))
        return [choice.text for choice in answer.choices]

    alone = draw(7)
    assert draw(7) == alone
    assert draw(8) != alone
    many = draw(7, n=8)
    assert many[0] == alone[0]
    assert len(set(many)) > 4


def test_log_probabilities(client: openai.OpenAI) -> None:
    """Each token comes with its log probability and as many alternatives as asked for."""
    answer = ask(client, logprobs=True, top_logprobs=5, max_tokens=8)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 8
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 5
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the likeliest"
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob, abs=1e-4)
        assert entry.logprob <= 0.0
    text = b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode()
    assert answer.choices[0].message.content == text


def test_stop_strings_and_lengths(client: openai.OpenAI) -> None:
    """A stop string ends the text before it; a length ends it with `length`."""
    stopped = ask(client, messages=COUNT, stop=[", 7"])
    assert stopped.choices[0].message.content == "1, 2, 3, 4, 5, 6"
    assert stopped.choices[0].finish_reason == "stop"
    cut = ask(client, messages=COUNT, max_completion_tokens=9)
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage is not None
    assert cut.usage.completion_tokens == 9


def test_plain_completions(client: openai.OpenAI) -> None:
    """The older endpoint takes text or token ids and gives the same for both."""
    answer = client.completions.create(
        model=MODEL, prompt="Lockstep is", max_tokens=12, temperature=0, logprobs=2
    )
    assert answer.choices[0].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 12


def test_errors_are_the_clients_errors(client: openai.OpenAI) -> None:
    """Bad input is a 4xx with a sentence that the client's own exceptions carry."""
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        ask(client, model="no-such-model")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ask(client, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="tokens"):
        ask(client, messages=[{"role": "user", "content": "word " * 20_000}])
    with pytest.raises(openai.BadRequestError, match="frobnicate"):
        ask(client, extra_body={"frobnicate": 1})


def test_a_client_that_leaves_frees_its_rows(
    client: openai.OpenAI, lockstep: RunningLockstep
) -> None:
    """Streams dropped in the middle, and calls dropped while they wait, leave nothing running."""
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
def test_sixteen_at_once_each_get_their_own(
    client: openai.OpenAI, lockstep: RunningLockstep
) -> None:
    """Concurrent requests of different prompts get what each gets alone."""
    words = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haze"] * 2
    prompts = [f"Repeat this text exactly:\n{word} {n} {word}" for n, word in enumerate(words)]

    def repeat(prompt: str) -> str:
        return (
            ask(client, messages=[{"role": "user", "content": prompt}]).choices[0].message.content
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
