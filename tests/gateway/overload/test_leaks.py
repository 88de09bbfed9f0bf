"""Leaks: after rounds of failing requests the gateway holds no more resources than before."""

import asyncio
import contextlib
import random
import socket
import subprocess
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.messages import RequestFailed, RequestRejected
from tests.gateway import raw_client, tiny_tokenizer
from tests.gateway.raw_client import Response
from tests.gateway.running_gateway import FORGET_FULL_QUEUE, RunningGateway
from tests.gateway.scripted_scheduler import ScriptedScheduler, finished, generated, reply_with
from tests.support.waiting import wait_until

_TOKENS: list[int] = tiny_tokenizer.train().encode("one two three " * 10).ids[:20]
_ROUNDS = 4
_STABLE_CHECKS = 7
"""Checks, 0.3 s apart, without a closed file: together longer than the body timeout."""


def _reply(request: Any) -> Iterator[Any]:
    """Reply with tokens, a rejection, an error, a gap or nothing, by the request's seed."""
    match request.sampling.seed % 5:
        case 0:
            yield RequestRejected(request_id=request.request_id, cause="queue_full", detail="No.")
        case 1:
            yield generated(request, 0, _TOKENS[:2])
            yield RequestFailed(request_id=request.request_id, cause="failed", detail="No.")
        case 2:
            yield generated(request, 3, _TOKENS[:2])
        case 3:
            yield 60.0
        case _:
            for position in range(request.generated_tokens, len(_TOKENS)):
                yield generated(request, position, _TOKENS[position : position + 1])
                yield 0.005
            yield finished(request, len(_TOKENS), "stop")


async def _disconnect(port: int, data: bytes, after_s: float) -> None:
    """Send data, and disconnect after `after_s` seconds."""
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        await asyncio.sleep(after_s)
        if after_s > 0.1:
            # SO_LINGER 0 sends a reset instead of an end.
            linger = b"\x01\0\0\0\0\0\0\0"
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()


async def _round(port: int, rng: random.Random) -> list[Response | None]:
    clients: list[Coroutine[Any, Any, Response | None]] = []
    for number in range(120):
        body = {"stream": rng.random() < 0.5, "seed": rng.randrange(2**31), "n": 2}
        data = raw_client.encode_request(body)
        match number % 4:
            case 0:
                clients.append(raw_client.send(port, data, timeout_s=0.6))
            case 1:
                clients.append(_disconnect(port, data, rng.random() * 0.2))
            case 2:
                cut = rng.randrange(len(data))
                clients.append(_disconnect(port, data[:cut], rng.random() * 0.2))
            case _:
                clients.append(
                    raw_client.send(port, data.replace(b'"tiny"', b"nonsense"), timeout_s=5.0)
                )
    return list(await asyncio.gather(*clients))


def _threads(gateway: RunningGateway) -> int:
    listed = Path(f"/proc/{gateway.process.pid}/task")
    if listed.is_dir():
        return len(list(listed.iterdir()))
    command = ["ps", "-M", "-p", str(gateway.process.pid)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return len(found.stdout.splitlines()) - 1


def _resources(gateway: RunningGateway) -> tuple[int, int]:
    """Return open files, the least of five counts 0.2 s apart, and threads."""
    files = []
    for _ in range(5):
        time.sleep(0.2)
        files.append(gateway.open_files())
    return min(files), _threads(gateway)


@pytest.mark.proof
def test_gateway_holds_no_file_thread_or_memory_of_failed_requests(
    model_folder: Path, tmp_path: Path
) -> None:
    """Promise 22: aborts, errors and a new scheduler leave no request, file, thread or memory."""
    rng = random.Random(4)
    settings: dict[str, Any] = {"body_timeout_s": 1.0, "prelude": FORGET_FULL_QUEUE}
    with RunningGateway.start(model_folder, tmp_path, **settings) as gateway:
        gateway.scheduler.reply = _reply
        asyncio.run(_round(gateway.port, rng))
        _settle(gateway)
        before, before_bytes = _resources(gateway), gateway.rss_bytes()
        for number in range(_ROUNDS):
            responses = asyncio.run(_round(gateway.port, rng))
            statuses = {response.status for response in responses if response is not None}
            assert {0, 400} <= statuses <= {0, 200, 400, 408, 429, 500, 503}
            if number == _ROUNDS // 2:
                gateway.scheduler.stop(says_goodbye=False)
                gateway.scheduler = ScriptedScheduler(gateway.scheduler.address)
                gateway.scheduler.reply = _reply
                gateway.wait_ready()
        _settle(gateway)
        after = _resources(gateway)
        assert after[0] <= before[0], (before, after)
        assert after[1] <= before[1], (before, after)
        assert gateway.rss_bytes() - before_bytes < 48 * 2**20
        gateway.scheduler.reply = reply_with(_TOKENS[:3])
        assert gateway.chat()[0] == 200
        logged = gateway.stop()
        assert "Traceback" not in logged, logged[-3_000:]


def _settle(gateway: RunningGateway) -> None:
    """Wait until only the test's own connections are open; half a body may take a second."""
    smallest, unchanged = gateway.open_files(), 0

    def is_settled() -> bool:
        nonlocal smallest, unchanged
        _, page = gateway.get("/metrics")
        files = gateway.open_files()
        unchanged = unchanged + 1 if files >= smallest else 0
        smallest = min(smallest, files)
        return b"lockstep_gateway_open_requests 0.0" in page and unchanged >= _STABLE_CHECKS

    wait_until(is_settled, 20.0, poll_s=0.3, failure="requests are still open")
