"""A TCP proxy that fails as networks do: it cuts, delays, half-closes, and falls silent one way.

All connections of one proxy share its fault, as those through one cable do.
"""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Coroutine
from typing import Any, Literal

_READ_BYTES = 65_536

Way = Literal["up", "down"]
"""up: from who dials to who listens."""


@dataclasses.dataclass(eq=False, slots=True)
class _Pipe:
    """One direction of one connection."""

    way: Way
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    has_ended: bool = False
    """Nothing can be sent any more, though the other end goes on sending here."""


class Proxy:
    """Listens on one port of 127.0.0.1 and connects to another, in a thread of its own."""

    def __init__(self, listen_port: int, target_port: int) -> None:
        """Listen; `close` ends it."""
        self._target_port = target_port
        self._delay_s = 0.0
        self._silent: set[Way] = set()
        self._pipes: set[_Pipe] = set()
        self.carried_bytes = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = self._call(
            asyncio.start_server(self._accept, "127.0.0.1", listen_port), self._loop
        )

    def delay(self, seconds: float) -> None:
        """Hold back every byte for so long from now on."""
        self._delay_s = seconds

    def silence(self, way: Way) -> None:
        """Carry nothing one way from now on; nobody is told. What is sent is lost."""
        self._silent.add(way)

    def restore(self) -> None:
        """Carry everything again. Connections that have lost bytes are cut: they are worthless."""
        was_silent = bool(self._silent)
        self._silent.clear()
        self._delay_s = 0.0
        if was_silent:
            self.cut()

    def cut(self) -> None:
        """End all connections at once, as when a cable is pulled; new ones are taken."""
        self._call(self._cut(), self._loop)

    def half_close(self) -> None:
        """End one direction of all connections; the other stays open."""
        self._call(self._half_close(), self._loop)

    def close(self) -> None:
        """End everything."""
        self._call(self._end(), self._loop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()

    @staticmethod
    def _call(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(10.0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        pipes = [_Pipe("up", reader, there[1]), _Pipe("down", there[0], writer)]
        self._pipes.update(pipes)
        try:
            async with asyncio.TaskGroup() as group:
                for pipe in pipes:
                    group.create_task(self._carry(pipe))
        finally:
            self._pipes.difference_update(pipes)
            for pipe in pipes:
                pipe.writer.transport.abort()

    async def _carry(self, pipe: _Pipe) -> None:
        """Carry one way until its end; a late byte does not hold back the reading of others."""
        later: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sender = asyncio.create_task(self._send_later(pipe, later))
        try:
            with contextlib.suppress(OSError):
                while data := await pipe.reader.read(_READ_BYTES):
                    if pipe.way not in self._silent:
                        later.put_nowait((self._loop.time() + self._delay_s, data))
            later.put_nowait((self._loop.time() + self._delay_s, b""))
            await sender
        finally:
            sender.cancel()

    async def _send_later(self, pipe: _Pipe, later: asyncio.Queue[tuple[float, bytes]]) -> None:
        with contextlib.suppress(OSError):
            while True:
                at_s, data = await later.get()
                if (wait_s := at_s - self._loop.time()) > 0.0:
                    await asyncio.sleep(wait_s)
                if not data:
                    self._end_pipe(pipe)
                    return
                if pipe.has_ended:
                    continue
                self.carried_bytes += len(data)
                pipe.writer.write(data)
                await pipe.writer.drain()

    async def _cut(self) -> None:
        for pipe in list(self._pipes):
            pipe.writer.transport.abort()

    async def _half_close(self) -> None:
        for pipe in list(self._pipes):
            if pipe.way == "up":
                self._end_pipe(pipe)

    @staticmethod
    def _end_pipe(pipe: _Pipe) -> None:
        pipe.has_ended = True
        with contextlib.suppress(OSError):
            if pipe.writer.can_write_eof() and not pipe.writer.is_closing():
                pipe.writer.write_eof()

    async def _end(self) -> None:
        self._server.close()
        await self._cut()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
