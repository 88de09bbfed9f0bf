"""Sixteen clients that stream without a break, in a thread of their own.

Each sends a request, reads its events, compares nothing and waits for nobody; what it received is a
`Record`. The thread that does the faults opens and closes the gate, and asks for pauses.
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

from tests.chaos.records import Expected, Record, Tally
from tests.chaos.stack import Stuck
from tests.chaos.tasks import Task

SILENCE_S = 150.0
"""No fault takes so long: a stream without a token for so long hangs. How long it takes in all is
no matter: where a rank stops every nine seconds, three hundred tokens take minutes."""
RETRY_S = 0.2
GAP_MIN_S = 0.03
"""Shorter gaps between two tokens are not remembered."""
DRAIN_TIMEOUT_S = 160.0
LOOK_S = 0.02

T = TypeVar("T")
Phase = Literal["decode", "prefill", "mixed", "idle"]


class Load:
    """The clients and what they have seen."""

    def __init__(self, port: int, tasks: Sequence[Task], streams: int, seed: int) -> None:
        """Start the thread; nothing is sent before `begin`."""
        self.expected: dict[str, Expected] = {}
        self._url = f"http://127.0.0.1:{port}/v1/chat/completions"
        self._tasks = list(tasks)
        self._chances = [random.Random(seed * 1_000 + number) for number in range(streams)]
        self._phase: Phase = "idle"
        self._open: list[Record | None] = [None] * streams
        self._progress_s = [0.0] * streams
        self._done: list[Record] = []
        self._gaps: list[tuple[float, float]] = []
        self._firsts: list[tuple[float, float]] = []
        """(begin, end) of waits for a next token, and for a first one."""
        self._stalls: list[tuple[float, float]] = []
        """(begin, end) of times in which this process was to run and did not."""
        self._due_s = math.inf
        """When it is to run next."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="load", daemon=True)
        self._thread.start()
        self._session = self._call(_new_session())
        self._clients = [
            asyncio.run_coroutine_threadsafe(self._client(number), self._loop)
            for number in range(streams)
        ]
        self._clients.append(asyncio.run_coroutine_threadsafe(self._note_stalls(), self._loop))

    # --- for the thread that does the faults -----------------------------------------------------

    def begin(self, phase: Phase) -> None:
        """Let the clients send what this phase is about; "idle": nothing new."""
        self._phase = phase

    def wait_progress(self, since_s: float, deadline_s: float) -> None:
        """Wait until every client has received a token, or begun anew, after `since_s`.

        Raises:
            Stuck: one has not.
        """
        until_s = time.monotonic() + deadline_s
        while not all(at_s > since_s for at_s in self._progress_s):
            if time.monotonic() > until_s:
                still = [n for n, at_s in enumerate(self._progress_s) if at_s <= since_s]
                raise Stuck(f"streams {still} got no token within {deadline_s:.0f} s")
            time.sleep(0.02)

    def drain(self) -> None:
        """Send nothing new and wait until every open stream has ended.

        Raises:
            Stuck: one has not.
        """
        self._phase = "idle"
        until_s = time.monotonic() + DRAIN_TIMEOUT_S
        while any(record is not None for record in self._open):
            if time.monotonic() > until_s:
                raise Stuck(f"streams did not end within {DRAIN_TIMEOUT_S:.0f} s")
            time.sleep(0.02)

    @property
    def open_streams(self) -> int:
        """Requests that are open at the moment."""
        return sum(record is not None for record in self._open)

    def longest_pause(self, begin_s: float, end_s: float) -> tuple[float, float]:
        """Return the longest waits that touch this time: for a next token, for a first one."""
        now_s = time.monotonic()
        gaps, firsts = list(self._gaps), list(self._firsts)
        for record in list(self._open):
            if record is not None:
                is_begun = record.last_s > 0.0
                (gaps if is_begun else firsts).append((record.last_s or record.sent_s, now_s))
        return _longest(gaps, begin_s, end_s), _longest(firsts, begin_s, end_s)

    def longest_stall(self, begin_s: float, end_s: float) -> float:
        """Return for how long at most this process was held up in this time.

        That was the machine or this process itself: a pause is measured too long by as much.
        """
        stalls = [*self._stalls, (self._due_s, time.monotonic())]
        return max(0.0, _longest(stalls, begin_s, end_s))

    def take_tally(self) -> Tally:
        """Return what the streams that have ended since the last call have shown; forgets them."""
        done, self._done = self._done, []
        self._gaps, self._firsts, self._stalls = [], [], []
        tally = Tally()
        for record in done:
            tally.add(record, self.expected[record.task.name])
        return tally

    def learn(self) -> list[str]:
        """Ask every task once, sixteen at a time, and keep the answers as the ones expected.

        Returns:
            What went wrong, in sentences.
        """
        records = self._call(self._ask_all())
        for record in records:
            self.expected[record.task.name] = Expected(
                record.text,
                tuple(record.tokens),
                record.completion_tokens,
                record.finish_reason,
            )
        return [f"{r.task.name}: {r.outcome} {r.problem}" for r in records if r.outcome != "ok"]

    def close(self) -> None:
        """End the clients and the thread."""
        for client in self._clients:
            client.cancel()
        self._call(_end(self._session))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DRAIN_TIMEOUT_S)

    # --- in the thread of the clients ------------------------------------------------------------

    async def _note_stalls(self) -> None:
        while True:
            self._due_s = time.monotonic() + LOOK_S
            await asyncio.sleep(LOOK_S)
            if (now_s := time.monotonic()) - self._due_s >= GAP_MIN_S:
                self._stalls.append((self._due_s, now_s))

    async def _client(self, number: int) -> None:
        chance = self._chances[number]
        while True:
            if self._phase == "idle":
                self._progress_s[number] = time.monotonic()
                await asyncio.sleep(0.02)
                continue
            task = chance.choice(self._tasks_of(self._phase))
            record = Record(task, time.monotonic())
            self._open[number] = record

            def note(at_s: float) -> None:
                self._progress_s[number] = at_s

            await self._ask(record, f"{chance.random()}" if task.is_long else "", note)
            self._done.append(record)
            self._open[number] = None
            if record.outcome != "ok":
                await asyncio.sleep(RETRY_S)

    def _tasks_of(self, phase: Phase) -> list[Task]:
        if phase == "mixed":
            return self._tasks
        return [task for task in self._tasks if task.is_long == (phase == "prefill")]

    async def _ask_all(self) -> list[Record]:
        left = list(self._tasks)
        records: list[Record] = []

        async def work() -> None:
            while left:
                record = Record(left.pop(), time.monotonic())
                await self._ask(record, "", lambda _at_s: None)
                records.append(record)

        await asyncio.gather(*(work() for _ in self._open))
        return records

    async def _ask(self, record: Record, salt: str, note: Callable[[float], None]) -> None:
        try:
            async with (
                asyncio.timeout(SILENCE_S) as patience,
                self._session.post(self._url, json=record.task.body(salt)) as response,
            ):
                if response.status != 200:
                    record.outcome = "refused"
                    record.problem = f"{response.status} {(await response.text())[:200]}"
                    return
                async for line in response.content:
                    if line.startswith(b"data: "):
                        self._take(record, line[6:].strip(), note)
                        patience.reschedule((record.last_s or record.sent_s) + SILENCE_S)
        except TimeoutError:
            record.outcome, record.problem = "lost", f"nothing for {SILENCE_S:.0f} s"
        except (aiohttp.ClientError, OSError) as error:
            record.problem = record.problem or f"{type(error).__name__}: {error}"
            record.outcome = "lost" if record.last_s else "refused"
        if record.outcome == "open":
            record.outcome = "lost"
            record.problem = record.problem or "it ended without [DONE]"

    def _take(self, record: Record, data: bytes, note: Callable[[float], None]) -> None:
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
                self._mark(record, note)

    def _mark(self, record: Record, note: Callable[[float], None]) -> None:
        now_s = time.monotonic()
        begin_s = record.last_s or record.sent_s
        if now_s - begin_s >= GAP_MIN_S:
            (self._gaps if record.last_s else self._firsts).append((begin_s, now_s))
        record.last_s = now_s
        note(now_s)


def _longest(gaps: list[tuple[float, float]], begin_s: float, end_s: float) -> float:
    return max((b - a for a, b in gaps if b >= begin_s and a <= end_s), default=0.0)


async def _new_session() -> aiohttp.ClientSession:
    # One connection per request: a connection that died in the pool would look like a lost stream.
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
    )


async def _end(session: aiohttp.ClientSession) -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
    await session.close()
