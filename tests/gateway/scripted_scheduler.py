"""Plays the scheduler on the bus: a real Listener in a thread, which answers as a script says."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from shared.errors import LinkError
from shared.identifiers import PeerId
from shared.messages import (
    AbortRequest,
    CachedPrefix,
    QueryStatus,
    RequestAccepted,
    RequestAdmitted,
    RequestFinished,
    StatusReported,
    SubmitRequest,
    TokenLogprobs,
    TokensGenerated,
    ToScheduler,
)
from shared.transport.links import Connected, Listener, Received

CONTEXT_TOKENS_MAX = 512

Reply = Callable[[SubmitRequest], Iterator[msgspec.Struct | float]]
"""Yields the messages that answer a request; a number is a pause in seconds."""


def status(**changes: object) -> StatusReported:
    """Return a status that says ready, with changes."""
    ready = StatusReported(
        ready=True,
        reason="",
        draining=False,
        model="tiny",
        model_fingerprint="0123456789abcdef",
        epoch=1,
        world_size=1,
        backend="off",
        ranks=[],
        running=2,
        waiting=1,
        kv_tokens_used=25,
        kv_tokens_max=100,
        context_tokens_max=CONTEXT_TOKENS_MAX,
        steps=7,
        counters={"preemptions_total": 3.0},
        gauges={"step_seconds": 0.01},
    )
    return msgspec.structs.replace(ready, **changes)


def finished(
    request: SubmitRequest, tokens: int, reason: str, cached: CachedPrefix | None = None
) -> RequestFinished:
    """Return the end of a request."""
    return msgspec.convert(
        {
            "type": "RequestFinished",
            "request_id": request.request_id,
            "finish_reason": reason,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": tokens,
            "cached": msgspec.to_builtins(cached or CachedPrefix()),
        },
        RequestFinished,
    )


def generated(request: SubmitRequest, position: int, tokens: list[int]) -> TokensGenerated:
    """Return new tokens of one request."""
    wanted = request.sampling.top_logprobs
    per_token = [
        TokenLogprobs(
            logprob=-0.5,
            top_ids=[token + n for n in range(wanted)],
            top_logprobs=[-0.5 - n for n in range(wanted)],
        )
        for token in tokens
        if wanted is not None
    ]
    return TokensGenerated(
        request_ids=[request.request_id],
        positions=[position],
        tokens=[tokens],
        logprobs=[per_token] if per_token else [],
    )


def say(
    tokens: list[int],
    reason: str = "stop",
    pause_s: float = 0.0,
    cached: CachedPrefix | None = None,
) -> Reply:
    """Answer with these tokens, one per message, after admitting with what was cached."""
    found = cached or CachedPrefix(memory_tokens=4)

    def reply(request: SubmitRequest) -> Iterator[msgspec.Struct | float]:
        yield RequestAccepted(request_id=request.request_id, queued_ahead=0)
        yield RequestAdmitted(request_id=request.request_id, cached=found)
        done = list(request.generated)
        for place in range(len(done), min(len(tokens), request.max_tokens)):
            yield generated(request, place, [tokens[place]])
            if pause_s:
                yield pause_s
        count = min(len(tokens), request.max_tokens)
        yield finished(request, count, "length" if count < len(tokens) else reason, found)

    return reply


def hold(tokens: list[int], may_end: threading.Event) -> Reply:
    """Answer with half of these tokens at once, and with the others when it may end."""

    def reply(request: SubmitRequest) -> Iterator[msgspec.Struct | float]:
        yield RequestAccepted(request_id=request.request_id, queued_ahead=0)
        for place in range(len(request.generated), len(tokens)):
            while place >= len(tokens) // 2 and not may_end.is_set():
                yield 0.01
            yield generated(request, place, [tokens[place]])
        yield finished(request, len(tokens), "stop")

    return reply


@dataclasses.dataclass
class _Running:
    peer: PeerId
    steps: Iterator[msgspec.Struct | float]
    due_s: float = 0.0


class ScriptedScheduler:
    """Answers each SubmitRequest with the messages of `reply`; keeps all orders."""

    def __init__(
        self, address: str, *, reply: Reply | None = None, reports: StatusReported | None = None
    ) -> None:
        """Listen, and answer from now on.

        Args:
            address: where.
            reply: answers orders; None: with no tokens.
            reports: what it says of itself; None: that it is ready.
        """
        self.reply: Reply = reply or say([])
        self.status = reports or status()
        self.orders: list[SubmitRequest] = []
        self.aborts: list[AbortRequest] = []
        self.address = address
        self._listener: Listener[msgspec.Struct] = Listener(address, ToScheduler)
        self._running: dict[str, _Running] = {}
        self._status_due_s = 0.0
        self._is_stopping = False
        self._is_silent_end = False
        self._forgets = False
        self._runs = threading.Event()
        self._runs.set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self, *, says_goodbye: bool = True) -> None:
        """End the thread and close the link; without a goodbye, as after SIGKILL."""
        self._is_silent_end = not says_goodbye
        self._is_stopping = True
        self._listener.wake()
        self._thread.join(10)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Do nothing at all meanwhile, as after SIGSTOP."""
        self._runs.clear()
        try:
            yield
        finally:
            self._runs.set()

    def forget_sessions(self) -> None:
        """Take all peers for lost, as after a long silence, though they are there."""
        self._forgets = True

    def reset(self) -> None:
        """Forget the script and the orders so far."""
        self.reply = say([])
        self.status = status()
        self.orders = []
        self.aborts = []

    def wait_aborts(self, count: int, timeout_s: float = 5.0) -> list[AbortRequest]:
        """Wait until so many aborts have arrived."""
        until_s = time.monotonic() + timeout_s
        while len(self.aborts) < count and time.monotonic() < until_s:
            time.sleep(0.01)
        return self.aborts

    def _run(self) -> None:
        while not self._is_stopping:
            self._runs.wait()
            if self._forgets:
                self._forgets = False
                for peer in self._listener.peers:
                    self._listener.drop(peer)
                    self._forget(peer)
            for event in self._listener.poll(0.002):
                if isinstance(event, Received):
                    self._take(event.peer, event.message)
                elif isinstance(event, Connected):
                    self._send(event.peer, self.status)
                else:
                    self._forget(event.peer)
            now_s = time.monotonic()
            if now_s >= self._status_due_s:
                self._status_due_s = now_s + 0.2
                for peer in self._listener.peers:
                    self._send(peer, self.status)
            for name, running in list(self._running.items()):
                self._advance(name, running, now_s)
        if self._is_silent_end:
            self._listener.socket.close()
        else:
            self._listener.close(0.2)

    def _take(self, peer: PeerId, message: msgspec.Struct) -> None:
        if isinstance(message, SubmitRequest):
            self.orders.append(message)
            self._running[message.request_id] = _Running(peer, self.reply(message))
        elif isinstance(message, AbortRequest):
            self.aborts.append(message)
            self._running.pop(message.request_id, None)
        elif isinstance(message, QueryStatus):
            self._send(peer, self.status)

    def _advance(self, name: str, running: _Running, now_s: float) -> None:
        while now_s >= running.due_s:
            step = next(running.steps, None)
            if step is None:
                self._running.pop(name, None)
                return
            if isinstance(step, float):
                running.due_s = now_s + step
                return
            self._send(running.peer, step)

    def _send(self, peer: PeerId, message: msgspec.Struct) -> None:
        try:
            self._listener.send(peer, message)
        except LinkError:
            self._forget(peer)

    def _forget(self, peer: PeerId) -> None:
        self._running = {
            name: running for name, running in self._running.items() if running.peer != peer
        }
