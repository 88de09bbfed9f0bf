"""Clients that stream one request after the other, in their own thread.

Each client records its stream in a `StreamRecord`; comparison comes later. The thread that injects
faults sets the phase and reads the pauses.
"""

import asyncio
import contextlib
import math
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, TypeVar

import aiohttp
import orjson

from tests.chaos.cluster.stack import wait_for
from tests.chaos.load.stream_records import ExpectedAnswer, StreamRecord, Tally
from tests.chaos.load.tasks import Task

SILENCE_S = 150.0
"""Seconds without a token after which a stream counts as hanging; no fault takes as long. The total
time is not limited: a rank that stops every nine seconds makes a stream last for minutes."""
RETRY_S = 0.2
GAP_MIN_S = 0.03
"""Shorter gaps between two tokens are not recorded."""
DRAIN_TIMEOUT_S = 160.0
POLL_S = 0.02

T = TypeVar("T")
Phase = Literal["decode", "prefill", "mixed", "idle"]


class Load:
    """The clients and their records."""

    def __init__(self, port: int, tasks: Sequence[Task], streams: int, seed: int) -> None:
        """Start the thread; no request is sent before `set_phase`."""
        self.expected: dict[str, ExpectedAnswer] = {}
        self._url = f"http://127.0.0.1:{port}/v1/chat/completions"
        self._tasks = list(tasks)
        self._rngs = [random.Random(seed * 1_000 + number) for number in range(streams)]
        self._phase: Phase = "idle"
        self._open: list[StreamRecord | None] = [None] * streams
        self._progress_s = [0.0] * streams
        self._done: list[StreamRecord] = []
        self._gaps: list[tuple[float, float]] = []
        self._first_token_waits: list[tuple[float, float]] = []
        """(begin, end) of waits: `_gaps` for a next token, these for a first one."""
        self._stalls: list[tuple[float, float]] = []
        """(begin, end) of times in which this process was due to run and did not."""
        self._due_s = math.inf
        """When this process is due to run next."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="load", daemon=True)
        self._thread.start()
        self._session = self._call(_new_session())
        self._clients = [
            asyncio.run_coroutine_threadsafe(self._client(number), self._loop)
            for number in range(streams)
        ]
        self._clients.append(asyncio.run_coroutine_threadsafe(self._note_stalls(), self._loop))

    # --- called by the thread that injects faults ------------------------------------------------

    def set_phase(self, phase: Phase) -> None:
        """Set which requests the clients send from now on; "idle": none."""
        self._phase = phase

    def wait_for_tokens(self, since_s: float, deadline_s: float) -> None:
        """Wait until each client has received a token or was idle after `since_s`.

        Raises:
            DeadlineExceeded: a stream got no token in time.
        """

        def waiting() -> list[int]:
            return [n for n, at_s in enumerate(self._progress_s) if at_s <= since_s]

        wait_for(lambda: not waiting(), deadline_s, lambda: f"streams {waiting()} got no token")

    def drain(self) -> None:
        """Send no new request and wait until all open streams have ended.

        Raises:
            DeadlineExceeded: a stream did not end in time.
        """
        self._phase = "idle"
        wait_for(lambda: not self.open_streams, DRAIN_TIMEOUT_S, "streams did not end")

    @property
    def open_streams(self) -> int:
        """Number of open requests."""
        return sum(record is not None for record in self._open)

    def longest_pause(self, begin_s: float, end_s: float) -> tuple[float, float]:
        """Return the longest waits within this time: for a next token, and for a first token."""
        now_s = time.monotonic()
        gaps, first_waits = list(self._gaps), list(self._first_token_waits)
        for record in list(self._open):
            if record is not None:
                has_tokens = record.last_s > 0.0
                (gaps if has_tokens else first_waits).append(
                    (record.last_s or record.sent_s, now_s)
                )
        return _longest(gaps, begin_s, end_s), _longest(first_waits, begin_s, end_s)

    def longest_stall(self, begin_s: float, end_s: float) -> float:
        """Return the longest time for which this process did not run within this time.

        A pause measured meanwhile may be too long by as much.
        """
        stalls = [*self._stalls, (self._due_s, time.monotonic())]
        return max(0.0, _longest(stalls, begin_s, end_s))

    def take_tally(self) -> Tally:
        """Return the tally of the streams that ended since the last call."""
        done, self._done = self._done, []
        self._gaps, self._first_token_waits, self._stalls = [], [], []
        tally = Tally()
        for record in done:
            tally.add(record, self.expected[record.task.name])
        return tally

    def learn_expected(self) -> list[str]:
        """Send each task once and keep the answers as the expected ones.

        Returns:
            A sentence for each request that failed.
        """
        records = self._call(self._send_all())
        for record in records:
            self.expected[record.task.name] = ExpectedAnswer(
                record.text,
                tuple(record.tokens),
                record.completion_tokens,
                record.finish_reason,
            )
        return [f"{r.task.name}: {r.outcome} {r.problem}" for r in records if r.outcome != "ok"]

    def close(self) -> None:
        """Stop the clients and the thread."""
        for client in self._clients:
            client.cancel()
        self._call(_close_session(self._session))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DRAIN_TIMEOUT_S)

    # --- run in the thread of the clients --------------------------------------------------------

    async def _note_stalls(self) -> None:
        while True:
            self._due_s = time.monotonic() + POLL_S
            await asyncio.sleep(POLL_S)
            if (now_s := time.monotonic()) - self._due_s >= GAP_MIN_S:
                self._stalls.append((self._due_s, now_s))

    async def _client(self, number: int) -> None:
        rng = self._rngs[number]
        while True:
            if self._phase == "idle":
                self._progress_s[number] = time.monotonic()
                await asyncio.sleep(0.02)
                continue
            task = rng.choice(self._tasks_of(self._phase))
            record = StreamRecord(task, time.monotonic())
            self._open[number] = record

            def set_progress(at_s: float) -> None:
                self._progress_s[number] = at_s

            await self._send(record, f"{rng.random()}" if task.is_long else "", set_progress)
            self._done.append(record)
            self._open[number] = None
            if record.outcome != "ok":
                await asyncio.sleep(RETRY_S)

    def _tasks_of(self, phase: Phase) -> list[Task]:
        if phase == "mixed":
            return self._tasks
        return [task for task in self._tasks if task.is_long == (phase == "prefill")]

    async def _send_all(self) -> list[StreamRecord]:
        tasks = list(self._tasks)
        records: list[StreamRecord] = []

        async def send_tasks() -> None:
            while tasks:
                record = StreamRecord(tasks.pop(), time.monotonic())
                await self._send(record, "", lambda _at_s: None)
                records.append(record)

        await asyncio.gather(*(send_tasks() for _ in self._open))
        return records

    async def _send(
        self, record: StreamRecord, salt: str, on_token: Callable[[float], None]
    ) -> None:
        try:
            async with (
                asyncio.timeout(SILENCE_S) as silence_timeout,
                self._session.post(self._url, json=record.task.body(salt)) as response,
            ):
                if response.status != 200:
                    record.outcome = "refused"
                    record.problem = f"{response.status} {(await response.text())[:200]}"
                    return
                async for line in response.content:
                    if line.startswith(b"data: "):
                        self._handle_event(record, line[6:].strip(), on_token)
                        silence_timeout.reschedule((record.last_s or record.sent_s) + SILENCE_S)
        except TimeoutError:
            record.outcome, record.problem = "lost", f"no event for {SILENCE_S:.0f} s"
        except (aiohttp.ClientError, OSError) as error:
            record.problem = record.problem or f"{type(error).__name__}: {error}"
            record.outcome = "lost" if record.last_s else "refused"
        if record.outcome == "open":
            record.outcome = "lost"
            record.problem = record.problem or "the stream ended without [DONE]"

    def _handle_event(
        self, record: StreamRecord, data: bytes, on_token: Callable[[float], None]
    ) -> None:
        if data == b"[DONE]":
            record.outcome = "ok" if record.completion_tokens >= 0 else "lost"
            return
        event = orjson.loads(data)
        if "error" in event:
            record.problem = str(event["error"])[:300]
            return
        if event.get("usage"):
            record.completion_tokens = event["usage"]["completion_tokens"]
        for choice in event.get("choices") or ():
            record.finish_reason = choice.get("finish_reason") or record.finish_reason
            entries = (choice.get("logprobs") or {}).get("content") or ()
            record.tokens += [bytes(entry["bytes"]).hex() for entry in entries]
            text = choice["delta"].get("content") or ""
            if text or entries:
                record.text += text
                self._record_token(record, on_token)

    def _record_token(self, record: StreamRecord, on_token: Callable[[float], None]) -> None:
        now_s = time.monotonic()
        begin_s = record.last_s or record.sent_s
        if now_s - begin_s >= GAP_MIN_S:
            (self._gaps if record.last_s else self._first_token_waits).append((begin_s, now_s))
        record.last_s = now_s
        on_token(now_s)


def _longest(gaps: list[tuple[float, float]], begin_s: float, end_s: float) -> float:
    return max((b - a for a, b in gaps if b >= begin_s and a <= end_s), default=0.0)


async def _new_session() -> aiohttp.ClientSession:
    # One connection per request: a dead connection in a pool would look like a lost stream.
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
    )


async def _close_session(session: aiohttp.ClientSession) -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
    await session.close()
