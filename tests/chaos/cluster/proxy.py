"""A TCP proxy with network faults: cut, delay, half-close, and silence in one direction.

A fault applies to all connections of the proxy, as with one cable.
"""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Coroutine
from typing import Any, Literal

_READ_BYTES = 65_536

Direction = Literal["up", "down"]
"""up: from the connecting side to the listening side."""


@dataclasses.dataclass(eq=False, slots=True)
class _Pipe:
    """One direction of one connection."""

    direction: Direction
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    has_ended: bool = False
    """Whether the sending side is closed; the other end may still send."""


class Proxy:
    """Forwards one port of 127.0.0.1 to another, in its own thread."""

    def __init__(self, listen_port: int, target_port: int) -> None:
        """Start listening."""
        self._target_port = target_port
        self._delay_s = 0.0
        self._silent: set[Direction] = set()
        self._pipes: set[_Pipe] = set()
        self.forwarded_bytes = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = self._call(
            asyncio.start_server(self._accept, "127.0.0.1", listen_port), self._loop
        )

    def delay(self, seconds: float) -> None:
        """Delay each byte by `seconds` from now on."""
        self._delay_s = seconds

    def silence(self, direction: Direction) -> None:
        """Drop all bytes in one direction from now on without closing a connection."""
        self._silent.add(direction)

    def restore(self) -> None:
        """End all faults; connections that may have lost bytes are cut."""
        was_silent = bool(self._silent)
        self._silent.clear()
        self._delay_s = 0.0
        if was_silent:
            self.cut()

    def cut(self) -> None:
        """Abort all connections, as when a cable is pulled; new ones are accepted."""
        self._call(self._cut(), self._loop)

    def half_close(self) -> None:
        """Close the `up` direction of all connections; `down` stays open."""
        self._call(self._half_close(), self._loop)

    def close(self) -> None:
        """Stop listening, abort all connections and end the thread."""
        self._call(self._stop(), self._loop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()

    @staticmethod
    def _call(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(10.0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            target = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        pipes = [_Pipe("up", reader, target[1]), _Pipe("down", target[0], writer)]
        self._pipes.update(pipes)
        try:
            async with asyncio.TaskGroup() as group:
                for pipe in pipes:
                    group.create_task(self._forward(pipe))
        finally:
            self._pipes.difference_update(pipes)
            for pipe in pipes:
                pipe.writer.transport.abort()

    async def _forward(self, pipe: _Pipe) -> None:
        """Forward one direction until its end; reading continues while bytes are delayed."""
        delayed: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sender = asyncio.create_task(self._send_delayed(pipe, delayed))
        try:
            with contextlib.suppress(OSError):
                while data := await pipe.reader.read(_READ_BYTES):
                    if pipe.direction not in self._silent:
                        delayed.put_nowait((self._loop.time() + self._delay_s, data))
            delayed.put_nowait((self._loop.time() + self._delay_s, b""))
            await sender
        finally:
            sender.cancel()

    async def _send_delayed(self, pipe: _Pipe, delayed: asyncio.Queue[tuple[float, bytes]]) -> None:
        with contextlib.suppress(OSError):
            while True:
                at_s, data = await delayed.get()
                if (wait_s := at_s - self._loop.time()) > 0.0:
                    await asyncio.sleep(wait_s)
                if not data:
                    self._end_pipe(pipe)
                    return
                if pipe.has_ended:
                    continue
                self.forwarded_bytes += len(data)
                pipe.writer.write(data)
                await pipe.writer.drain()

    async def _cut(self) -> None:
        for pipe in list(self._pipes):
            pipe.writer.transport.abort()

    async def _half_close(self) -> None:
        for pipe in list(self._pipes):
            if pipe.direction == "up":
                self._end_pipe(pipe)

    @staticmethod
    def _end_pipe(pipe: _Pipe) -> None:
        pipe.has_ended = True
        with contextlib.suppress(OSError):
            if pipe.writer.can_write_eof() and not pipe.writer.is_closing():
                pipe.writer.write_eof()

    async def _stop(self) -> None:
        self._server.close()
        await self._cut()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
