"""After rounds of everything that goes wrong, the gateway holds no more than before."""

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
from tests.gateway.raw_client import Answer
from tests.gateway.running_gateway import FORGETFUL, RunningGateway
from tests.gateway.scripted_scheduler import ScriptedScheduler, finished, generated, say

_TOKENS: list[int] = tiny_tokenizer.train().encode("one two three " * 10).ids[:20]
_ROUNDS = 4
_UNCHANGED = 6
"""Looks, 0.3 s apart, that find no file closed: longer than a body may take."""


def _reply(request: Any) -> Iterator[Any]:
    """Answer well, badly, with an error, or not at all, by the seed."""
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
            for place in range(len(request.generated), len(_TOKENS)):
                yield generated(request, place, _TOKENS[place : place + 1])
                yield 0.005
            yield finished(request, len(_TOKENS), "stop")


async def _leave(port: int, data: bytes, after_s: float) -> None:
    """Send a request, or part of it, and go without a word."""
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        await asyncio.sleep(after_s)
        if after_s > 0.1:
            # With a reset instead of an end.
            linger = b"\x01\0\0\0\0\0\0\0"
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()


async def _round(port: int, chance: random.Random) -> list[Answer | None]:
    doing: list[Coroutine[Any, Any, Answer | None]] = []
    for number in range(120):
        body = {"stream": chance.random() < 0.5, "seed": chance.randrange(2**31), "n": 2}
        data = raw_client.request(body)
        match number % 4:
            case 0:
                doing.append(raw_client.ask(port, data, timeout_s=0.6))
            case 1:
                doing.append(_leave(port, data, chance.random() * 0.2))
            case 2:
                cut = chance.randrange(len(data))
                doing.append(_leave(port, data[:cut], chance.random() * 0.2))
            case _:
                doing.append(
                    raw_client.ask(port, data.replace(b'"tiny"', b"nonsense"), timeout_s=5.0)
                )
    return list(await asyncio.gather(*doing))


def _threads(gateway: RunningGateway) -> int:
    listed = Path(f"/proc/{gateway.process.pid}/task")
    if listed.is_dir():
        return len(list(listed.iterdir()))
    command = ["ps", "-M", "-p", str(gateway.process.pid)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return len(found.stdout.splitlines()) - 1


def _facts(gateway: RunningGateway) -> tuple[int, int]:
    """Return open files and threads; our own last question's connection may be closing yet."""
    files = []
    for _ in range(5):
        time.sleep(0.2)
        files.append(gateway.open_files())
    return min(files), _threads(gateway)


@pytest.mark.proof
def test_nothing_is_left_of_what_went_wrong(model_folder: Path, tmp_path: Path) -> None:
    """Promise 22: open requests, files, threads and memory after aborts, errors and a new peer."""
    chance = random.Random(4)
    settings: dict[str, Any] = {"body_timeout_s": 1.0, "prelude": FORGETFUL}
    with RunningGateway.start(model_folder, tmp_path, **settings) as gateway:
        gateway.scheduler.reply = _reply
        asyncio.run(_round(gateway.port, chance))
        _settle(gateway)
        before, before_bytes = _facts(gateway), gateway.rss_bytes()
        for number in range(_ROUNDS):
            answers = asyncio.run(_round(gateway.port, chance))
            told = {answer.status for answer in answers if answer is not None}
            assert {0, 400} <= told <= {0, 200, 400, 408, 429, 500, 503}
            if number == _ROUNDS // 2:
                gateway.scheduler.stop(says_goodbye=False)
                gateway.scheduler = ScriptedScheduler(gateway.scheduler.address)
                gateway.scheduler.reply = _reply
                gateway.wait_ready()
        _settle(gateway)
        after = _facts(gateway)
        assert after[0] <= before[0], (before, after)
        assert after[1] <= before[1], (before, after)
        assert gateway.rss_bytes() - before_bytes < 48 * 2**20
        gateway.scheduler.reply = say(_TOKENS[:3])
        assert gateway.chat()[0] == 200
        logged = gateway.stop()
        assert "Traceback" not in logged, logged[-3_000:]


def _settle(gateway: RunningGateway) -> None:
    """Wait until all connections but our own are closed: half a body may come for a second yet."""
    until_s = time.monotonic() + 20.0
    smallest, unchanged = gateway.open_files(), 0
    while time.monotonic() < until_s:
        time.sleep(0.3)
        _, page = gateway.get("/metrics")
        files = gateway.open_files()
        unchanged = unchanged + 1 if files >= smallest else 0
        if b"lockstep_gateway_open_requests 0.0" in page and unchanged >= _UNCHANGED:
            return
        smallest = min(smallest, files)
    raise AssertionError("requests are still open")
