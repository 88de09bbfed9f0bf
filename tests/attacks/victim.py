"""The victim of an attack: one stream and one request after another, in its own process.

A separate process, so that the attacking threads do not hold up its measurement.
"""

import asyncio
import dataclasses
import itertools
import json
import multiprocessing
import queue
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from typing import Any

import aiohttp

from tests.attacks.attacker import MODEL
from tests.attacks.target import HOST, VICTIM_KEY

STREAM_TOKENS = 2_000
REQUEST_EVERY_S = 0.1
LARGE_CHARS = 100_000
REQUEST_TIMEOUT_S = 60.0
KINDS = ("short", "large", "grammar", "stored")
"""Kinds of its requests: a few bytes, 100 KB, with a grammar, and after a stored response."""
OPEN_MAX = 2
"""Requests that the victim has open at once."""
_STOP_S = 90.0
_RESPONSE = {"model": MODEL, "input": "Remember one word.", "max_output_tokens": 1}


@dataclasses.dataclass(slots=True)
class Experience:
    """Measurements of a victim, times in seconds."""

    gap_s: float = 0.0
    """Longest time between two tokens of its stream."""
    tokens: int = 0
    """Events received on its streams."""
    latencies_s: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: {kind: [] for kind in KINDS}
    )
    """Duration of each request that was answered with 200, by its kind."""
    refusals: list[str] = dataclasses.field(default_factory=list)
    """Status and body of each request that was answered with something else."""

    @property
    def longest_s(self) -> dict[str, float]:
        """The longest duration of a request of each kind."""
        return {kind: max(values, default=0.0) for kind, values in self.latencies_s.items()}


class Victim:
    """A running victim; `stop` returns its measurements."""

    def __init__(self, port: int) -> None:
        """Start its process; return when its stream has begun."""
        context = multiprocessing.get_context("spawn")
        self._stopping = context.Event()
        self._results: Queue[Any] = context.Queue()
        self._process = context.Process(
            target=_run, args=(port, self._stopping, self._results), daemon=True
        )
        self._process.start()
        try:
            self._results.get(timeout=_STOP_S)
        except queue.Empty:
            self._process.kill()
            raise AssertionError("the victim's stream did not begin") from None

    def stop(self) -> Experience:
        """End the victim and return its measurements since its start."""
        self._stopping.set()
        try:
            experience: Experience = self._results.get(timeout=_STOP_S)
        except queue.Empty:
            experience = Experience(gap_s=_STOP_S, refusals=["the victim got no answer"])
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()
        return experience


def _run(port: int, stopping: Event, results: "Queue[Any]") -> None:
    asyncio.run(_suffer(port, stopping, results))


async def _suffer(port: int, stopping: Event, results: "Queue[Any]") -> None:
    experience = Experience()
    timeout = aiohttp.ClientTimeout(total=None, sock_read=REQUEST_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {VICTIM_KEY}"}
    url = f"http://{HOST}:{port}"
    async with aiohttp.ClientSession(url, headers=headers, timeout=timeout) as session:
        stored = await _store(session, experience)
        first = asyncio.Event()
        tasks = [
            asyncio.create_task(_keep_streaming(session, experience, first)),
            asyncio.create_task(_keep_requesting(session, experience, stored)),
        ]
        await first.wait()
        results.put("streaming")
        await asyncio.to_thread(stopping.wait)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    results.put(experience)


async def _keep_streaming(
    session: aiohttp.ClientSession, experience: Experience, first: asyncio.Event
) -> None:
    """Keep one stream open; a gap is counted between two tokens of one stream."""
    number = 0
    while True:
        number += 1
        body = {
            "model": MODEL,
            "prompt": f"Story number {number}:",
            "stream": True,
            "max_tokens": STREAM_TOKENS,
            "temperature": 1.0,
            "seed": number,
        }
        last_s: float | None = None
        try:
            async with session.post("/v1/completions", json=body) as response:
                if response.status != 200:
                    experience.refusals.append(f"{response.status} {await response.text()}"[:300])
                    await asyncio.sleep(REQUEST_EVERY_S)
                    continue
                ended = False
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        now_s = time.monotonic()
                        if last_s is not None:
                            experience.gap_s = max(experience.gap_s, now_s - last_s)
                        last_s = now_s
                        experience.tokens += 1
                        first.set()
                        if b'"error"' in line:
                            experience.refusals.append(f"in the stream: {line[:300]!r}")
                    ended = ended or line.startswith(b"data: [DONE]")
                if not ended:
                    experience.refusals.append("a stream ended without [DONE]")
        except asyncio.CancelledError:
            # The present silence is a gap too.
            if last_s is not None:
                experience.gap_s = max(experience.gap_s, time.monotonic() - last_s)
            raise
        except (aiohttp.ClientError, TimeoutError) as error:
            experience.refusals.append(f"the stream failed: {error!r}"[:300])
            await asyncio.sleep(REQUEST_EVERY_S)


async def _store(session: aiohttp.ClientSession, experience: Experience) -> str:
    """Store a response and return its id."""
    while "id" not in (answer := await _request(session, experience, "/v1/responses", _RESPONSE)):
        pass
    return str(answer["id"])


async def _keep_requesting(
    session: aiohttp.ClientSession, experience: Experience, stored: str
) -> None:
    """Send one request after another, of each kind in turn."""
    for kind in itertools.cycle(KINDS):
        path = "/v1/completions"
        body = {"model": MODEL, "prompt": "One word:", "max_tokens": 1, "temperature": 0.0}
        if kind == "large":
            body["metadata"] = {"text": "x" * LARGE_CHARS}
        elif kind == "grammar":
            body["guided_choice"] = ["yes", f"no {time.monotonic_ns()}"]  # new each time
        elif kind == "stored":
            path, body = "/v1/responses", {**_RESPONSE, "previous_response_id": stored}
            body["store"] = False
        await _request(session, experience, path, body, kind)


async def _request(
    session: aiohttp.ClientSession,
    experience: Experience,
    path: str,
    body: dict[str, Any],
    kind: str | None = None,
) -> dict[str, Any]:
    """Send a request and wait a moment; return the JSON of its answer, {} if it was refused."""
    began_s = time.monotonic()
    answer: dict[str, Any] = {}
    try:
        async with session.post(path, json=body) as response:
            text = await response.text()
            if response.status == 200:
                answer = json.loads(text)
            else:
                experience.refusals.append(f"{kind} {response.status} {text}"[:300])
    except asyncio.CancelledError:
        if kind is not None:
            experience.latencies_s[kind].append(time.monotonic() - began_s)
        raise
    except (aiohttp.ClientError, TimeoutError) as error:
        experience.refusals.append(f"a request failed: {error!r}"[:300])
    if answer and kind is not None:
        experience.latencies_s[kind].append(time.monotonic() - began_s)
    await asyncio.sleep(REQUEST_EVERY_S)
    return answer
