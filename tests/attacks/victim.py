"""The victim of an attack: one stream and one short request after another, in its own process.

A separate process, so that the attacking threads do not hold up its measurement.
"""

import asyncio
import dataclasses
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
REQUEST_EVERY_S = 0.25
REQUEST_TIMEOUT_S = 60.0
OPEN_MAX = 2
"""Requests that the victim has open at once."""
_STOP_S = 90.0


@dataclasses.dataclass(slots=True)
class Experience:
    """Measurements of a victim, times in seconds."""

    gap_s: float = 0.0
    """Longest time between two tokens of its stream."""
    tokens: int = 0
    """Events received on its streams."""
    latencies_s: list[float] = dataclasses.field(default_factory=list)
    """Duration of each short request that was answered with 200."""
    refusals: list[str] = dataclasses.field(default_factory=list)
    """Status and body of each request that was answered with something else."""

    @property
    def latency_s(self) -> float:
        """The longest duration of a short request."""
        return max(self.latencies_s, default=0.0)


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
    url = f"http://{HOST}:{port}/v1/completions"
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        first = asyncio.Event()
        tasks = [
            asyncio.create_task(_keep_streaming(session, url, experience, first)),
            asyncio.create_task(_keep_requesting(session, url, experience)),
        ]
        await first.wait()
        results.put("streaming")
        await asyncio.to_thread(stopping.wait)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    results.put(experience)


async def _keep_streaming(
    session: aiohttp.ClientSession, url: str, experience: Experience, first: asyncio.Event
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
            async with session.post(url, json=body) as response:
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


async def _keep_requesting(
    session: aiohttp.ClientSession, url: str, experience: Experience
) -> None:
    """Send one short request after another."""
    body = {"model": MODEL, "prompt": "One word:", "max_tokens": 1, "temperature": 0.0}
    while True:
        began_s = time.monotonic()
        try:
            async with session.post(url, json=body) as response:
                text = await response.text()
                if response.status == 200:
                    experience.latencies_s.append(time.monotonic() - began_s)
                else:
                    experience.refusals.append(f"{response.status} {text}"[:300])
        except asyncio.CancelledError:
            experience.latencies_s.append(time.monotonic() - began_s)
            raise
        except (aiohttp.ClientError, TimeoutError) as error:
            experience.refusals.append(f"a request failed: {error!r}"[:300])
        await asyncio.sleep(REQUEST_EVERY_S)
