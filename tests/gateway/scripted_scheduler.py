"""Scripted scheduler: a real Listener in a thread that answers requests with given messages."""

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
    RequestRejected,
    StatusReported,
    SubmitRequest,
    TokenLogprobs,
    TokensGenerated,
    ToScheduler,
)
from shared.transport.links import Connected, Listener, Received
from tests.support.waiting import wait_until

CONTEXT_TOKENS_MAX = 512

Reply = Callable[[SubmitRequest], Iterator[msgspec.Struct | float]]
"""Yields the messages that answer one request; a number is a pause in seconds."""


def ready_status(**changes: object) -> StatusReported:
    """Return the report of a ready scheduler, with these fields changed."""
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
    """Return the message that ends a request."""
    return msgspec.convert(
        {
            "type": "RequestFinished",
            "request_id": request.request_id,
            "finish_reason": reason,
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": tokens,
            "cached": msgspec.to_builtins(cached or CachedPrefix()),
        },
        RequestFinished,
    )


def generated(request: SubmitRequest, position: int, tokens: list[int]) -> TokensGenerated:
    """Return new tokens of one request, starting at `position`."""
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


def reply_with(
    tokens: list[int],
    reason: str = "stop",
    pause_s: float = 0.0,
    cached: CachedPrefix | None = None,
) -> Reply:
    """Return a reply that admits with `cached` and sends one token per message."""
    found = cached or CachedPrefix(memory_tokens=4)

    def reply(request: SubmitRequest) -> Iterator[msgspec.Struct | float]:
        yield RequestAccepted(request_id=request.request_id, queued_ahead=0)
        yield RequestAdmitted(request_id=request.request_id, cached=found)
        for position in range(request.generated_tokens, min(len(tokens), request.max_tokens)):
            yield generated(request, position, [tokens[position]])
            if pause_s:
                yield pause_s
        count = min(len(tokens), request.max_tokens)
        yield finished(request, count, "length" if count < len(tokens) else reason, found)

    return reply


def reject_with(cause: str, detail: str, retry_after_s: float | None = None) -> Reply:
    """Return a reply that refuses the request."""

    def reply(request: SubmitRequest) -> Iterator[msgspec.Struct | float]:
        yield RequestRejected(
            request_id=request.request_id,
            cause=cause,  # type: ignore[arg-type]
            detail=detail,
            retry_after_s=retry_after_s,
        )

    return reply


def reply_after(tokens: list[int], release: threading.Event) -> Reply:
    """Return a reply that sends half of the tokens at once and the others after `release`."""

    def reply(request: SubmitRequest) -> Iterator[msgspec.Struct | float]:
        yield RequestAccepted(request_id=request.request_id, queued_ahead=0)
        for position in range(request.generated_tokens, len(tokens)):
            while position >= len(tokens) // 2 and not release.is_set():
                yield 0.01
            yield generated(request, position, [tokens[position]])
        yield finished(request, len(tokens), "stop")

    return reply


@dataclasses.dataclass
class _Running:
    peer: PeerId
    steps: Iterator[msgspec.Struct | float]
    due_s: float = 0.0


class ScriptedScheduler:
    """Answers each SubmitRequest with the messages of `reply`; records requests and aborts."""

    def __init__(
        self, address: str, *, reply: Reply | None = None, report: StatusReported | None = None
    ) -> None:
        """Listen, and answer until `stop`.

        Args:
            address: ZeroMQ address of the socket.
            reply: answers requests; None: with no tokens.
            report: the status that it reports; None: ready.
        """
        self.reply: Reply = reply or reply_with([])
        self.status = report or ready_status()
        self.submitted: list[SubmitRequest] = []
        self.aborts: list[AbortRequest] = []
        self.address = address
        self._listener: Listener[msgspec.Struct] = Listener(address, ToScheduler)
        self._running: dict[str, _Running] = {}
        self._status_due_s = 0.0
        self._is_stopping = False
        self._ends_silently = False
        self._forgets_sessions = False
        self._is_running = threading.Event()
        self._is_running.set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self, *, says_goodbye: bool = True) -> None:
        """End the thread and close the link; without a goodbye as after SIGKILL."""
        self._ends_silently = not says_goodbye
        self._is_stopping = True
        self._listener.wake()
        self._thread.join(10)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the thread inside the context, as SIGSTOP does."""
        self._is_running.clear()
        try:
            yield
        finally:
            self._is_running.set()

    def forget_sessions(self) -> None:
        """Drop all peers, as after a long silence; the gateway still believes in its session."""
        self._forgets_sessions = True

    def reset(self) -> None:
        """Restore the default reply and status, and clear the records."""
        self.reply = reply_with([])
        self.status = ready_status()
        self.submitted = []
        self.aborts = []

    def wait_aborts(self, count: int, timeout_s: float = 5.0) -> list[AbortRequest]:
        """Wait until `count` aborts have arrived, and return all aborts."""
        wait_until(
            lambda: len(self.aborts) >= count,
            timeout_s,
            failure=lambda: f"{len(self.aborts)} of {count} aborts have arrived",
        )
        return self.aborts

    def _run(self) -> None:
        while not self._is_stopping:
            self._is_running.wait()
            if self._forgets_sessions:
                self._forgets_sessions = False
                for peer in self._listener.peers:
                    self._listener.drop(peer)
                    self._drop_requests(peer)
            for event in self._listener.poll(0.002):
                if isinstance(event, Received):
                    self._handle(event.peer, event.message)
                elif isinstance(event, Connected):
                    self._send(event.peer, self.status)
                else:
                    self._drop_requests(event.peer)
            now_s = time.monotonic()
            if now_s >= self._status_due_s:
                self._status_due_s = now_s + 0.2
                for peer in self._listener.peers:
                    self._send(peer, self.status)
            for name, running in list(self._running.items()):
                self._advance(name, running, now_s)
        if self._ends_silently:
            self._listener.socket.close()
        else:
            self._listener.close(0.2)

    def _handle(self, peer: PeerId, message: msgspec.Struct) -> None:
        if isinstance(message, SubmitRequest):
            self.submitted.append(message)
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
            self._drop_requests(peer)

    def _drop_requests(self, peer: PeerId) -> None:
        self._running = {
            name: running for name, running in self._running.items() if running.peer != peer
        }
