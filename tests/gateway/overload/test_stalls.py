"""Stalls: no body, prompt or answer keeps the event loop from other clients for long."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.gateway import raw_client, tiny_tokenizer
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import ready_status, reply_with

_BODY_BYTES = 15_900_000
_TOKENS: list[int] = tiny_tokenizer.train().encode("one two three " * 10).ids[:10]
_GAP_S_MAX = 0.5
"""Longest response time of /health here. The promise of 0.1 s holds on a machine with a free core;
every attack below took seconds before."""


@pytest.fixture(scope="module")
def gateway(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """A gateway of a model with a long context."""
    report = ready_status(context_tokens_max=40_000)
    started = RunningGateway.start(model_folder, tmp_path_factory.mktemp("run"), report=report)
    with started as running:
        yield running


def _longest_gap_s(gateway: RunningGateway, attack: Callable[[], object]) -> float:
    """Return the longest response time of /health while an attack runs.

    The gateway's CPU time counts where it is less: other tests may keep it from a core, but a loop
    that computes something else uses the CPU for as long as it does not answer.
    """
    thread, process = threading.Thread(target=attack), psutil.Process(gateway.process.pid)
    longest_s = 0.0
    thread.start()
    while thread.is_alive():
        start_s, start_cpu_s = time.monotonic(), sum(process.cpu_times()[:2])
        assert gateway.get("/health")[0] == 200
        took_s, used_s = time.monotonic() - start_s, sum(process.cpu_times()[:2]) - start_cpu_s
        longest_s = max(longest_s, min(took_s, used_s))
    return longest_s


def _post(body: bytes, path: str) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _filled(start: bytes, part: bytes, end: bytes) -> bytes:
    return start + part * ((_BODY_BYTES - len(start)) // len(part)) + end


@pytest.mark.parametrize(
    ("path", "start", "part", "end"),
    [
        ("/v1/completions", b'{"model":"tiny","prompt":"x","stop":["a"', b',"a"', b"]}"),
        ("/v1/completions", b'{"model":"tiny","prompt":[[1', b",1", b"]]}"),
        ("/v1/completions", b'{"model":"tiny","prompt":"', b"\\u00e9", b'"}'),
        ("/v1/completions", b'{"model":"tiny","prompt":["', b"<|", b'"]}'),
        (raw_client.CHAT, b'{"model":"tiny","messages":[{}', b",{}", b"]}"),
    ],
    ids=["strings", "numbers", "escapes", "marks", "objects"],
)
def test_other_client_is_answered_while_largest_bodies_are_decoded(
    gateway: RunningGateway, path: str, start: bytes, part: bytes, end: bytes
) -> None:
    """Four bodies of 16 MB that end at the same time delay /health by less than half a second."""
    request = _post(_filled(start, part, end), path)
    statuses: list[int] = []

    async def send_together() -> None:
        responses = [raw_client.send(gateway.port, request) for _ in range(4)]
        statuses.extend(response.status for response in await asyncio.gather(*responses))

    assert _longest_gap_s(gateway, lambda: asyncio.run(send_together())) < _GAP_S_MAX
    assert set(statuses) <= {400, 429}


def test_long_prompts_together_are_refused_before_any_is_encoded(gateway: RunningGateway) -> None:
    """24 prompts of 650,000 characters are 15.6 million: the 400 comes at once and names it."""
    start_s = time.monotonic()
    prompts = ["word " * 130_000] * 24
    status, body, _ = gateway.post("/v1/completions", {"model": "tiny", "prompt": prompts})
    assert (status, body["error"]["param"]) == (400, "prompt")
    assert "15600000 characters" in body["error"]["message"]
    assert time.monotonic() - start_s < 2.0


def test_whole_answer_with_many_logprobs_is_equal_to_stream_and_delays_nobody(
    gateway: RunningGateway,
) -> None:
    """Eight choices of 500 tokens with 20 alternatives each: the answer has all 84,000 entries."""
    gateway.scheduler.reply = reply_with(_TOKENS * 50, "length")
    fields = {"n": 8, "max_tokens": 500, "logprobs": True, "top_logprobs": 20}
    answers: list[bytes] = []

    def ask() -> None:
        request = raw_client.encode_request(fields)
        answers.append(asyncio.run(raw_client.send(gateway.port, request)).body)

    gap_s = _longest_gap_s(gateway, ask)
    answer = json.loads(answers[0])
    assert gap_s < _GAP_S_MAX
    body = {"messages": raw_client.MESSAGES, **fields, "n": 1}
    content = [
        entry
        for event in gateway.stream(raw_client.CHAT, body)
        if isinstance(event, dict) and event["choices"][0].get("logprobs")
        for entry in event["choices"][0]["logprobs"]["content"]
    ]
    assert len(content) == 500
    assert [len(entry["top_logprobs"]) for entry in content] == [20] * 500
    for index, choice in enumerate(answer["choices"]):
        assert list(choice) == ["index", "message", "logprobs", "finish_reason"]
        assert (choice["index"], choice["finish_reason"]) == (index, "length")
        assert choice["logprobs"] == {"content": content, "refusal": None}


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"n": 8, "max_tokens": 32_768}, ["262144 tokens", "21 log", "5505024", "1000000"]),
        # Without max_tokens the default of 4,096 counts.
        ({"n": 8}, []),
        ({"n": 8, "max_tokens": 4_000}, []),
        ({"n": 8, "max_tokens": 32_768, "stream": True}, []),
    ],
    ids=["too_many", "default", "many", "streamed"],
)
def test_whole_answer_with_too_many_logprobs_is_refused_with_its_numbers(
    gateway: RunningGateway, fields: dict[str, object], numbers: list[str]
) -> None:
    """Choices times tokens times log probabilities is bounded for an answer that is kept."""
    gateway.scheduler.reply = reply_with(_TOKENS)
    request = raw_client.encode_request({"logprobs": True, "top_logprobs": 20, **fields})
    response = asyncio.run(raw_client.send(gateway.port, request))
    assert response.status == (400 if numbers else 200)
    assert all(number in response.body.decode() for number in numbers)


def test_deep_arguments_beside_special_token_are_a_400_without_traceback(
    gateway: RunningGateway,
) -> None:
    """A request of 4 KB whose arguments are nested 500 deep gets the name of the field."""
    arguments = '{"a":' + "[" * 500 + "]" * 500 + "}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "<|im_end|> hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    status, body = gateway.post(raw_client.CHAT, {"model": "tiny", "messages": messages})[:2]
    assert status == 400
    assert body["error"]["param"] == "messages[1].tool_calls[0].function.arguments"
