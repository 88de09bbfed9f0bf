"""More than can be served: refused at once with the time to come back, and nothing else suffers."""

import asyncio
import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.gateway.http.connection_limits import connections_max
from shared.messages import RequestAccepted, RequestRejected
from tests.gateway import raw_client, tiny_tokenizer
from tests.gateway.concurrent_requests import until
from tests.gateway.raw_client import Answer
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import finished, generated, hold, say

_TOKENS: list[int] = tiny_tokenizer.train().encode("one two three " * 10).ids[:10]


class Capacity:
    """Serves a few requests at once, lets a few wait, rejects the rest: a scheduler's policy."""

    def __init__(self, slots: int, waiting_max: int, token_s: float) -> None:
        self._free = slots
        self._waiting_max = waiting_max
        self._token_s = token_s
        self._waiting: list[str] = []

    def __call__(self, request: Any) -> Iterator[Any]:
        """Answer one request."""
        name = request.request_id
        if len(self._waiting) >= self._waiting_max:
            yield RequestRejected(
                request_id=name, cause="queue_full", detail="Full.", retry_after_s=2.4
            )
            return
        yield RequestAccepted(request_id=name, queued_ahead=len(self._waiting))
        self._waiting.append(name)
        while not self._free or self._waiting[0] != name:
            yield 0.001
        self._waiting.remove(name)
        self._free -= 1
        for place, token in enumerate(_TOKENS):
            yield generated(request, place, [token])
            yield self._token_s
        self._free += 1
        yield finished(request, len(_TOKENS), "stop")


async def _offer(port: int, per_second: float, seconds: float) -> list[Answer]:
    """Send requests at a steady rate, whatever becomes of them."""
    data = raw_client.request({"stream": True})
    start_s = time.monotonic()
    asking = []
    for number in range(int(per_second * seconds)):
        await asyncio.sleep(max(0.0, start_s + number / per_second - time.monotonic()))
        asking.append(asyncio.create_task(raw_client.ask(port, data)))
    return list(await asyncio.gather(*asking))


def _goodput(answers: list[Answer]) -> float:
    """Return whole answers per second, while there were any."""
    ends = sorted(answer.ended_s for answer in answers if answer.is_whole)
    return (len(ends) - 1) / (ends[-1] - ends[0])


def _check_each(answers: list[Answer]) -> None:
    """Who was not served was told so."""
    text = tiny_tokenizer.train().decode(_TOKENS)
    for answer in answers:
        assert answer.is_whole or answer.is_honest_refusal, (answer.status, answer.body[:200])
        assert not answer.is_whole or answer.text == text


@pytest.mark.alone
def test_ten_times_the_capacity_is_refused_not_suffered(model_folder: Path, tmp_path: Path) -> None:
    """Promise 16: 200 or 429 with Retry-After, flat memory, as many answers as at capacity."""
    with RunningGateway.start(model_folder, tmp_path) as gateway:
        # 4 slots, 10 tokens of 20 ms: 20 requests a second.
        gateway.scheduler.reply = Capacity(slots=4, waiting_max=8, token_s=0.02)
        once = asyncio.run(_offer(gateway.port, 20.0, 3.0))
        _check_each(once)
        before_bytes = gateway.rss_bytes()
        goodputs: list[float] = []
        # One pause of the machine takes most of one run; the gateway's own weakness takes of each.
        while len(goodputs) < 3 and max(goodputs, default=0.0) <= 0.6 * _goodput(once):
            tenfold = asyncio.run(_offer(gateway.port, 200.0, 4.0))
            _check_each(tenfold)
            assert sum(answer.status == 429 for answer in tenfold) > len(tenfold) // 2
            assert {a.headers["retry-after"] for a in tenfold if a.status == 429} == {"3"}
            goodputs.append(_goodput(tenfold))
        grown_bytes = gateway.rss_bytes() - before_bytes
        assert max(goodputs) > 0.6 * _goodput(once)
        assert grown_bytes < 64 * 2**20
        assert b"lockstep_gateway_open_requests 0.0" in gateway.get("/metrics")[1]


def test_a_crowd_at_a_full_gateway_gets_429(model_folder: Path, tmp_path: Path) -> None:
    """300 clients in one moment against 8 places: 8 are served, the others are told when."""
    may_end = threading.Event()
    with RunningGateway.start(model_folder, tmp_path, open_requests_max=8) as gateway:
        gateway.scheduler.reply = hold(_TOKENS, may_end)

        async def crowd() -> list[Answer]:
            data = raw_client.request({"stream": True})
            answers = []
            for answer in asyncio.as_completed(
                [raw_client.ask(gateway.port, data) for _ in range(300)]
            ):
                answers.append(await answer)
                if len(answers) == 292:
                    may_end.set()
            return answers

        answers = asyncio.run(crowd())
        assert sum(answer.is_whole for answer in answers) == 8
        assert sum(answer.is_honest_refusal for answer in answers) == 292
        assert len(gateway.scheduler.orders) == 8


def _open(gateway: RunningGateway, data: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", gateway.port))
    client.sendall(data)
    client.settimeout(10.0)
    return client


def test_a_full_gateway_refuses_before_it_reads(model_folder: Path, tmp_path: Path) -> None:
    """No byte of a large body is needed to say no; choices that are too many neither pass."""
    with RunningGateway.start(model_folder, tmp_path, open_requests_max=2) as gateway:
        gateway.scheduler.reply = say(_TOKENS * 10, pause_s=0.1)
        with contextlib.ExitStack() as opened:
            for _ in range(2):
                opened.enter_context(_open(gateway, raw_client.request({"stream": True})))
            until(lambda: len(gateway.scheduler.orders) == 2)
            head = (
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: 3000000\r\n\r\n"
            )
            answer = opened.enter_context(_open(gateway, head)).recv(65_536)
            assert answer.startswith(b"HTTP/1.1 429 ")
            assert b"\r\nRetry-After: 2\r\n" in answer
        gateway.scheduler.wait_aborts(2)
        gateway.scheduler.reply = say(_TOKENS[:2])
        assert gateway.chat()[0] == 200
        status, error = gateway.chat(n=3)
        assert (status, error["error"]["code"]) == (429, "queue_full")


@pytest.mark.proof
def test_half_sent_bodies_hold_places_only_until_their_deadline(
    model_folder: Path, tmp_path: Path
) -> None:
    """Places count from the headers on, so what drips fills them; then they are free again."""
    settings: dict[str, Any] = {"open_requests_max": 4, "body_timeout_s": 5.0}
    with RunningGateway.start(model_folder, tmp_path, **settings) as gateway:
        gateway.scheduler.reply = say(_TOKENS[:2])
        with contextlib.ExitStack() as opened:
            for _ in range(4):
                opened.enter_context(_open(gateway, raw_client.request({})[:-5]))
            until(lambda: gateway.chat()[0] == 429)
            until(lambda: gateway.chat()[0] == 200)


def test_more_connections_than_files_are_told_so(model_folder: Path, tmp_path: Path) -> None:
    """A process with 256 descriptors keeps some: who comes too late gets a 429, nobody hangs."""
    prelude = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))"
    may_end = threading.Event()
    started = RunningGateway.start(model_folder, tmp_path, prelude=prelude, header_timeout_s=60.0)
    with started as gateway:
        gateway.scheduler.reply = hold(_TOKENS, may_end)
        before = gateway.open_files()
        with contextlib.ExitStack() as opened:
            stream = opened.enter_context(_open(gateway, raw_client.request({"stream": True})))
            idle = [
                opened.enter_context(socket.create_connection(("127.0.0.1", gateway.port)))
                for _ in range(250)
            ]
            # Of a crowd that comes at once some are closed without a word; who comes next is not.
            held = connections_max(256)
            until(lambda: _ended(idle) >= len(idle) + 1 - held)
            until(lambda: gateway.open_files() <= before + held)
            late = asyncio.run(raw_client.ask(gateway.port, raw_client.request({})))
            assert late.is_honest_refusal, late
            assert json.loads(late.body)["error"]["code"] == "queue_full"
            idle[0].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            idle[0].settimeout(10.0)
            assert idle[0].recv(65_536).startswith(b"HTTP/1.1 200 ")
            may_end.set()
            received = b""
            while piece := stream.recv(65_536):
                received += piece
            assert b"data: [DONE]" in received
        gateway.scheduler.reply = say(_TOKENS[:2])
        until(lambda: _status(gateway) == 200)
        assert "out of system resource" not in gateway.stop()


def _ended(clients: list[socket.socket]) -> int:
    """Return how many of them have been told something, or were closed."""
    with selectors.DefaultSelector() as waiting:
        for client in clients:
            waiting.register(client, selectors.EVENT_READ)
        return len(waiting.select(0.0))


def _status(gateway: RunningGateway) -> int:
    return asyncio.run(raw_client.ask(gateway.port, raw_client.request({}))).status


@pytest.mark.proof
def test_prompts_that_wait_for_an_encoder_are_a_429(model_folder: Path, tmp_path: Path) -> None:
    """All encoders are busy for too long: who waited is told to come back, not that it is wrong."""
    prelude = (
        "import time, services.gateway.endpoints.completion_service as s; "
        "import services.gateway.tokenizing.tokenizer as t; "
        "s.ENCODE_S_MAX = 1.0; "
        "t.Tokenizer.encode_text = lambda self, text: time.sleep(8.0 if text == 'slow' else 0) "
        "or [40]"
    )
    with RunningGateway.start(model_folder, tmp_path, prelude=prelude) as gateway:
        gateway.scheduler.reply = say(_TOKENS[:2])
        slow: list[int] = []
        quick: list[tuple[int, dict[str, str]]] = []

        def post(prompt: str) -> tuple[int, dict[str, str]]:
            status, _, headers = gateway.post(
                "/v1/completions", {"model": "tiny", "prompt": prompt}
            )
            return status, headers

        def ask_quick() -> int:
            quick.append(post("x"))
            return quick[-1][0]

        threads = [threading.Thread(target=lambda: slow.append(post("slow")[0])) for _ in range(2)]
        for thread in threads:
            thread.start()
        # As long as an encoder is free it is encoded.
        until(lambda: ask_quick() != 200)
        for thread in threads:
            thread.join(30)
        assert slow == [400, 400]
        status, headers = quick[-1]
        assert (status, headers["retry-after"]) == (429, "1")
        until(lambda: ask_quick() == 200, 30.0)
