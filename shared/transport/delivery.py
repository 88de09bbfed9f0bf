"""One peer's side of a reliable link, without I/O: numbers, acknowledges, resends, refuses.

ZeroMQ delivers in order while a connection stands, but loses messages at reconnects and cannot tell
a restarted peer from the old one. A session binds two incarnations. Within it every message has a
number; the receiver acknowledges cumulatively, and the sender keeps a bounded list of what is not
acknowledged and sends it again from the first gap (go-back-N, as in RFC 9293's predecessors). A
message for another incarnation is refused and counted, never executed.
"""

import dataclasses
import itertools
import secrets
from collections import deque

from msgspec import Struct

from shared import limits
from shared.errors import FrameRefused, LinkFull
from shared.identifiers import Incarnation


def new_incarnation() -> Incarnation:
    """Draw the number that tells this process from the one before it."""
    return Incarnation(secrets.randbits(62) + 1)


class Frame(Struct, frozen=True, gc=False):
    """What travels: a header of plain fields, and a body ("" for control)."""

    epoch: int
    sender: Incarnation
    receiver: Incarnation
    """Whom the sender believes to talk to; 0 in a hello."""
    number: int
    """Position in the session, from 1; 0 for control frames, which are not acknowledged."""
    acknowledged: int
    """Highest number received in order from the other side."""
    kind: str
    """"m" for a message, else one of the control kinds below."""
    body: bytes = b""


UNREACHABLE_AFTER_S = 1.0
"""A peer without a connection for so long is gone. One that lives reconnects within half of it; one
that is stopped, or whose cable is cut, keeps its connection."""

UNREACHABLE_AFTER_SENDS = 3
"""And so many frames could not be sent: a clock that leapt while nobody looked proves nothing."""

MESSAGE = "m"
HELLO = "hello"
WELCOME = "welcome"
ALIVE = "alive"
RESET = "reset"
GOODBYE = "goodbye"


@dataclasses.dataclass(slots=True)
class _Unacked:
    number: int
    epoch: int
    body: bytes
    sent_at_s: float


class Session:
    """The state of one session with one incarnation of a peer. Times are monotonic seconds."""

    def __init__(self, own: Incarnation, peer: Incarnation, now_s: float) -> None:
        self.own = own
        self.peer = peer
        self.heard_at_s = now_s
        self.duplicates = 0
        self.gaps = 0
        self.resent = 0
        self._unreachable_since_s = 0.0
        self._failed_sends = 0
        self._sent_at_s = now_s
        self._next_number = 1
        self._received = 0
        self._ack_owed = 0
        self._ack_owed_since_s = 0.0
        self._unacked: deque[_Unacked] = deque()
        self._unacked_bytes = 0

    def send(self, epoch: int, body: bytes, now_s: float) -> Frame:
        """Number a message and keep it until it is acknowledged.

        Raises:
            LinkFull: too much is unacknowledged, or it is longer than a peer accepts; the message
                was not taken.
        """
        if len(body) > limits.MESSAGE_BYTES_MAX:
            # The peer's socket would hang up on it, again and again, and on all that is behind it.
            raise LinkFull(f"a message of {len(body)} bytes is longer than any peer accepts")
        if len(self._unacked) >= limits.UNACKED_MESSAGES_MAX:
            raise LinkFull(f"{len(self._unacked)} messages are not acknowledged by the peer")
        if self._unacked_bytes + len(body) > limits.UNACKED_BYTES_MAX:
            raise LinkFull(f"{self._unacked_bytes} bytes are not acknowledged by the peer")
        entry = _Unacked(self._next_number, epoch, body, now_s)
        self._next_number += 1
        self._unacked.append(entry)
        self._unacked_bytes += len(body)
        return self._frame(entry, now_s)

    def receive(self, frame: Frame, now_s: float) -> bool:
        """Take a frame of this session; True when it is a message to be delivered now.

        Raises:
            FrameRefused: it acknowledges what was never sent.
        """
        if frame.acknowledged >= self._next_number:
            raise FrameRefused(f"message {frame.acknowledged} is acknowledged but was never sent")
        self.heard_at_s = now_s
        self._failed_sends = 0
        self._forget(frame.acknowledged)
        if frame.kind != MESSAGE:
            return False
        if self._ack_owed == 0:
            self._ack_owed_since_s = now_s
        self._ack_owed += 1
        if frame.number <= self._received:
            self.duplicates += 1
            return False
        if frame.number > self._received + 1:
            # Something before it was lost. It comes again, with everything behind it.
            self.gaps += 1
            return False
        self._received = frame.number
        return True

    def due(self, now_s: float) -> list[Frame]:
        """Return what must be sent now unasked: resends, acknowledgements, keep-alives."""
        frames = []
        if self._unacked and now_s - self._unacked[0].sent_at_s >= limits.RESEND_AFTER_S:
            # The oldest only: a peer that is merely slow must not be buried under copies. Once it
            # acknowledges these, those behind them are due at once.
            for entry in itertools.islice(self._unacked, limits.RESEND_MESSAGES_MAX):
                entry.sent_at_s = now_s
                self.resent += 1
                frames.append(self._frame(entry, now_s))
        owes_ack = self._ack_owed >= limits.ACK_EVERY_MESSAGES or (
            self._ack_owed > 0 and now_s - self._ack_owed_since_s >= limits.ACK_DELAY_S
        )
        if not frames and (owes_ack or now_s - self._sent_at_s >= limits.KEEPALIVE_S):
            frames.append(self.control(ALIVE, now_s))
        return frames

    def due_in_s(self, now_s: float) -> float:
        """Return after how many seconds `due` has something to say, 0 or more."""
        at_s = self._sent_at_s + limits.KEEPALIVE_S
        if self._ack_owed:
            at_s = min(at_s, self._ack_owed_since_s + limits.ACK_DELAY_S)
        if self._unacked:
            at_s = min(at_s, self._unacked[0].sent_at_s + limits.RESEND_AFTER_S)
        return max(0.0, at_s - now_s)

    def control(self, kind: str, now_s: float) -> Frame:
        """Return a control frame of this session; it carries the acknowledgement."""
        self._settle(now_s)
        return Frame(0, self.own, self.peer, 0, self._received, kind)

    def is_silent(self, now_s: float) -> bool:
        """Tell whether the peer has not been heard for `limits.PEER_SILENCE_S`."""
        return now_s - self.heard_at_s > limits.PEER_SILENCE_S

    def note_sent(self, now_s: float, *, is_reachable: bool) -> None:
        """Take in whether there was a connection to send over."""
        if is_reachable:
            self._failed_sends = 0
            return
        if self._failed_sends == 0:
            self._unreachable_since_s = now_s
        self._failed_sends += 1

    def owns(self, frame: Frame) -> bool:
        """Tell whether a frame is of this session, and not of another life of one of its ends."""
        return frame.sender == self.peer and frame.receiver == self.own

    def loss(self, now_s: float) -> str:
        """Return why the peer is lost: it is silent, or its process has ended; "" if it is not."""
        if self.is_silent(now_s):
            return f"silent for {limits.PEER_SILENCE_S:.0f} s"
        # A killed process says nothing, but its connection closes.
        return "gone" if self.is_gone(now_s) else ""

    def is_gone(self, now_s: float) -> bool:
        """Tell whether there has been no connection to the peer for `UNREACHABLE_AFTER_S`."""
        if self._failed_sends < UNREACHABLE_AFTER_SENDS:
            return False
        return now_s - self._unreachable_since_s >= UNREACHABLE_AFTER_S

    @property
    def unacknowledged(self) -> int:
        """Messages that the peer has not acknowledged."""
        return len(self._unacked)

    def _frame(self, entry: _Unacked, now_s: float) -> Frame:
        self._settle(now_s)
        return Frame(
            entry.epoch, self.own, self.peer, entry.number, self._received, MESSAGE, entry.body
        )

    def _settle(self, now_s: float) -> None:
        self._sent_at_s = now_s
        self._ack_owed = 0

    def _forget(self, acknowledged: int) -> None:
        while self._unacked and self._unacked[0].number <= acknowledged:
            self._unacked_bytes -= len(self._unacked.popleft().body)
