"""Relay between a client and a server, with a transcript of all requests and answers.

Owns forwarding and the transcript; changes no byte of a body.
"""

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
from aiohttp import web

_OWN_HEADERS = {"connection", "content-length", "transfer-encoding", "keep-alive"}
"""Headers that belong to one connection."""
_CACHE = re.compile(r"(\w+)=(\d+)")
_LAST_EVENTS = (b"data: [DONE]\n", b"event: message_stop\n", b"event: response.completed\n")
SHOWN_CHARACTERS = 1_500
"""Limit for one text in the transcript."""


@dataclass
class Exchange:
    """One request and its answer."""

    method: str
    path: str
    body: bytes
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    answer: bytes = b""
    is_forwarded: bool = False
    """All of the answer was forwarded."""
    broken_by: str = ""
    """Error that ended it before, and when; "CancelledError" is a client that left."""

    @property
    def is_whole(self) -> bool:
        """Whether the client has got the whole answer.

        Clients may leave after the last event of a stream, before its end.
        """
        return self.is_forwarded or any(one in self.answer for one in _LAST_EVENTS)

    @property
    def request(self) -> dict[str, Any]:
        """The JSON of the request; {} if it has none."""
        with contextlib.suppress(ValueError):
            found = json.loads(self.body)
            return found if isinstance(found, dict) else {}
        return {}

    @property
    def called(self) -> list[str]:
        """The names of the tools that the answer calls, in any dialect."""
        return [name for event in self._events() for name in _called(event)]

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were in the cache, from `x-lockstep-cache`."""
        found = dict(_CACHE.findall(self.headers.get("x-lockstep-cache", "")))
        return int(found.get("memory", 0)) + int(found.get("ssd", 0))

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt that were computed, from `x-lockstep-cache`."""
        found = dict(_CACHE.findall(self.headers.get("x-lockstep-cache", "")))
        return int(found.get("computed", 0))

    def _events(self) -> Iterator[dict[str, Any]]:
        """Yield the JSON of the events of a stream, or that of a whole answer."""
        for line in self.answer.splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line.removeprefix(b"data:"))
                if isinstance(event, dict):
                    yield event

    def __str__(self) -> str:
        request = self.request
        turns = request.get("messages") or request.get("input") or []
        last = json.dumps(turns[-1], ensure_ascii=False) if turns else ""
        end = f", broken off by {self.broken_by}" if self.broken_by else ""
        lines = [
            f"{self.method} {self.path} -> {self.status}{end}",
            f"  request: {len(self.body):,} bytes, {len(turns)} turns, fields {sorted(request)}",
            f"  tools: {len(request.get('tools') or [])}",
            f"  cache: {self.headers.get('x-lockstep-cache', '-')}",
            f"  ignored: {self.headers.get('x-lockstep-ignored', '-')}",
            f"  last turn: {last[-SHOWN_CHARACTERS:]}",
            f"  calls: {self.called}",
            f"  answer: {self.answer.decode(errors='replace')[-SHOWN_CHARACTERS:]}",
        ]
        return "\n".join(lines)


def _called(event: dict[str, Any]) -> list[str]:
    """Return the names of the tools whose calls begin with an event."""
    blocks = [event.get("content_block") or {}]
    if event.get("type") == "response.output_item.done":
        blocks.append(event["item"])
    for choice in event.get("choices") or []:
        calls = choice.get("delta", {}).get("tool_calls") or []
        blocks += [{"type": "tool_use", **call["function"]} for call in calls]
    types = {"tool_use", "function_call", "custom_tool_call"}
    return [one["name"] for one in blocks if one.get("type") in types and one.get("name")]


class Relay:
    """Forwards what arrives on listening sockets to a server, in a thread of its own."""

    def __init__(self, server_url: str, first_posts_delay_s: float = 0.0) -> None:
        """Start without listening.

        Args:
            server_url: where to forward to.
            first_posts_delay_s: time after the first POST in which none is forwarded, as if the
                server had no place: the client gets no headers meanwhile.
        """
        self.exchanges: list[Exchange] = []
        """All exchanges, in the order of the requests."""
        self._server_url = server_url
        self._posts_delay_s = first_posts_delay_s
        self._posts_from_s: float | None = None
        """When POSTs are forwarded; None: none has come."""
        self._watched: tuple[bytes, Callable[[], None]] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self._open())

    @classmethod
    @contextlib.contextmanager
    def to(cls, server_url: str, first_posts_delay_s: float = 0.0) -> Iterator[Self]:
        """Run a relay, made with these arguments, for a block."""
        relay = cls(server_url, first_posts_delay_s)
        try:
            yield relay
        finally:
            relay._run(relay._close())
            relay._loop.call_soon_threadsafe(relay._loop.stop)
            relay._thread.join()
            relay._loop.close()

    @property
    def transcript(self) -> str:
        """All exchanges as text."""
        return "\n\n".join(f"[{number}] {one}" for number, one in enumerate(self.exchanges, 1))

    @contextlib.contextmanager
    def listening(self, listener: socket.socket) -> Iterator[None]:
        """Forward what arrives on a listening socket during a block, and close it."""

        async def start() -> web.SockSite:
            site = web.SockSite(self._runner, listener)
            await site.start()
            return site

        site = self._run(start())
        try:
            yield
        finally:
            self._run(site.stop())

    def when_answered(self, text: str, act: Callable[[], None]) -> None:
        """Call `act` once, in the relay's thread, before a text in an answer is forwarded."""
        self._watched = (text.encode(), act)

    async def _open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False)
        application = web.Application(client_max_size=2**28)
        application.router.add_route("*", "/{path:.*}", self._forward)
        # A client that leaves must look to the server as if it had left.
        self._runner = web.AppRunner(application, handler_cancellation=True)
        await self._runner.setup()

    async def _close(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        exchange = Exchange(request.method, request.path_qs, await request.read())
        self.exchanges.append(exchange)
        begun_s = time.monotonic()
        try:
            return await self._exchange(request, exchange)
        except BaseException as error:
            age_s = time.monotonic() - begun_s
            exchange.broken_by = f"{type(error).__name__}({error}) after {age_s:.1f} s"
            raise

    async def _exchange(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        if request.method == "POST":
            if self._posts_from_s is None:
                self._posts_from_s = time.monotonic() + self._posts_delay_s
            await asyncio.sleep(max(0.0, self._posts_from_s - time.monotonic()))
        headers = [(k, v) for k, v in request.headers.items() if k.lower() not in _OWN_HEADERS]
        async with self._session.request(
            request.method,
            self._server_url + request.path_qs,
            headers=headers,
            data=exchange.body or None,
            allow_redirects=False,
        ) as answered:
            exchange.status = answered.status
            exchange.headers = {name.lower(): text for name, text in answered.headers.items()}
            response = web.StreamResponse(status=answered.status)
            for name, text in answered.headers.items():
                if name.lower() not in _OWN_HEADERS:
                    response.headers.add(name, text)
            await response.prepare(request)
            async for piece in answered.content.iter_any():
                exchange.answer += piece
                self._watch(exchange)
                await response.write(piece)
            exchange.is_forwarded = True
        return response

    def _watch(self, exchange: Exchange) -> None:
        if self._watched and self._watched[0] in exchange.answer:
            _, act = self._watched
            self._watched = None
            act()

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30.0)
