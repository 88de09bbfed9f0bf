"""Server-sent events of one HTTP answer, with arrival times, parsed from its raw bytes.

Runs after a measurement, so that the client spends little time per read while it measures.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

END = b"[DONE]"


@dataclasses.dataclass(frozen=True, slots=True)
class SseEvent:
    """One `data:` line of a stream of server-sent events."""

    at_s: float
    """Time at which the read with its last byte returned, on the clock of the reads."""
    data: bytes
    """The line without `data:` and without spaces around it."""


@dataclasses.dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """Status, events and body of one HTTP answer, parsed from its raw bytes."""

    status: int
    """0: no status line arrived."""
    events: list[SseEvent]
    """In order, without the end mark `[DONE]`."""
    ended: bool
    """The stream contains its end mark, `[DONE]`."""
    body: bytes
    """The body without chunk framing."""


def parse_answer(received: Sequence[tuple[float, bytes]]) -> StreamedAnswer:
    """Parse the raw bytes of an HTTP answer into status, server-sent events and body.

    Args:
        received: (time of arrival in seconds, bytes) of each read, in order.

    Returns:
        The part that arrived; status 0 when no complete HTTP head arrived.
    """
    raw = b"".join(data for _, data in received)
    head, found, _ = raw.partition(b"\r\n\r\n")
    if not found:
        return StreamedAnswer(0, [], False, b"")
    status = head.split(b" ", 2)[1] if head.startswith(b"HTTP/") else b""
    ends = list(itertools.accumulate(len(data) for _, data in received))
    pieces = _body_pieces(raw, len(head) + 4, is_chunked(head))
    events, body = _events(pieces, [at_s for at_s, _ in received], ends)
    return StreamedAnswer(
        int(status) if status.isdigit() else 0,
        [event for event in events if event.data != END],
        any(event.data == END for event in events),
        body,
    )


def is_chunked(head: bytes) -> bool:
    """Return whether an HTTP head contains `Transfer-Encoding: chunked`."""
    return b"transfer-encoding: chunked" in head.lower()


def _body_pieces(raw: bytes, start: int, chunked: bool) -> list[tuple[int, bytes]]:
    """Return (offset in the raw bytes, body bytes) for each piece of the body."""
    if not chunked:
        return [(start, raw[start:])]
    pieces: list[tuple[int, bytes]] = []
    while (line_end := raw.find(b"\r\n", start)) >= 0:
        try:
            size = int(raw[start:line_end].split(b";")[0], 16)
        except ValueError:
            break
        if size == 0:
            break
        pieces.append((line_end + 2, raw[line_end + 2 : line_end + 2 + size]))
        start = line_end + 2 + size + 2
    return pieces


def _events(
    pieces: Sequence[tuple[int, bytes]], times_s: Sequence[float], ends: Sequence[int]
) -> tuple[list[SseEvent], bytes]:
    """Return the events and the body.

    Args:
        pieces: (offset in the raw bytes, body bytes).
        times_s: time of each read.
        ends: offset in the raw bytes at which each read ends.
    """
    body = b"".join(data for _, data in pieces)
    body_ends = list(itertools.accumulate(len(data) for _, data in pieces))
    events = []
    position = 0
    for line in body.split(b"\n"):
        position += len(line) + 1
        if not line.startswith(b"data:"):
            continue
        last = min(position, len(body)) - 1
        piece = bisect.bisect_right(body_ends, last)
        offset = pieces[piece][0] + last - (body_ends[piece - 1] if piece else 0)
        events.append(SseEvent(times_s[bisect.bisect_right(ends, offset)], line[5:].strip()))
    return events, body
