"""Reliable delivery to one peer, without I/O. Owns numbering, acknowledgements and resends.

ZeroMQ delivers in order while a connection lasts, but loses messages at reconnects and cannot tell
a restarted peer from its predecessor. A session connects two incarnations. Its messages are
numbered; the receiver acknowledges cumulatively, and the sender keeps a bounded list of
unacknowledged messages and resends them from the first gap (go-back-N, Tanenbaum, Computer
Networks, section 3.4). Messages for another incarnation are counted, never executed.
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
    """Return a random number that tells this process or session from its predecessors."""
    return Incarnation(secrets.randbits(62) + 1)


class Frame(Struct, frozen=True, gc=False):
    """One transmission: a header and, for messages, a body."""

    epoch: int
    """Epoch that the message belongs to; 0 on the gateway link and in control frames."""
    sender: Incarnation
    receiver: Incarnation
    """Incarnation of the peer as the sender knows it; 0 in a hello."""
    number: int
    """Position in the session, from 1; 0 for control frames, which are not acknowledged."""
    acknowledged: int
    """Highest number received in order from the peer."""
    kind: str
    """"m" for a message, else one of the control kinds below."""
    body: bytes = b""


UNREACHABLE_AFTER_S = 1.0
"""Seconds without a connection after which a peer has ended. A live peer reconnects within half of
this time. A stopped process or a cut cable keeps its connection."""

UNREACHABLE_AFTER_SENDS = 3
"""Failed sends that are required in addition: a jump of the clock alone proves nothing."""

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
    """Numbers, acknowledges and resends the messages between this process and one incarnation.

    `now_s` in its methods is the current monotonic time, in seconds.
    """

    def __init__(self, own: Incarnation, peer: Incarnation, now_s: float) -> None:
        """Begin a session between two incarnations, this process's own and the peer's."""
        self.own = own
        self.peer = peer
        self.last_received_s = now_s
        self.silence_s = limits.PEER_SILENCE_S
        """Silence after which the peer is lost."""
        self.may_be_silent = False
        """The peer does not count as lost however long nothing comes from it."""
        self.duplicates = 0
        self.gaps = 0
        self.resent = 0
        self._is_quiet = False
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
        """Return the frame for a message, and keep the message for resends until acknowledged.

        Args:
            epoch: epoch that the message belongs to.
            body: the encoded message.
            now_s: the current monotonic time, in seconds.

        Raises:
            LinkFull: when too much is unacknowledged, or the message exceeds MESSAGE_BYTES_MAX. It
                was not sent.
        """
        if len(body) > limits.MESSAGE_BYTES_MAX:
            # The peer's socket would close the connection at every resend of it.
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
        """Process a frame of this session, for which `matches` is True.

        Args:
            frame: the frame.
            now_s: the current monotonic time, in seconds.

        Returns:
            True for the next message in order, to be delivered now. False for a control frame, a
            duplicate, and a message after a gap, which the peer will send again.

        Raises:
            FrameRefused: when it acknowledges a message that was never sent.
        """
        if frame.acknowledged >= self._next_number:
            raise FrameRefused(f"message {frame.acknowledged} is acknowledged but was never sent")
        self.last_received_s = now_s
        self._failed_sends = 0
        self._drop_acknowledged(frame.acknowledged)
        if frame.kind != MESSAGE:
            return False
        if self._ack_owed == 0:
            self._ack_owed_since_s = now_s
        self._ack_owed += 1
        if frame.number <= self._received:
            self.duplicates += 1
            return False
        if frame.number > self._received + 1:
            # A message before it was lost. The sender resends that one and all later ones.
            self.gaps += 1
            return False
        self._received = frame.number
        return True

    def due_frames(self, now_s: float) -> list[Frame]:
        """Return the resends, acknowledgements and keep-alives that must be sent at `now_s`."""
        frames = []
        if self._unacked and now_s - self._unacked[0].sent_at_s >= limits.RESEND_AFTER_S:
            # Only the oldest, so that a slow peer is not flooded with copies. Once it acknowledges
            # them, the next ones are due at once.
            for entry in itertools.islice(self._unacked, limits.RESEND_MESSAGES_MAX):
                entry.sent_at_s = now_s
                self.resent += 1
                frames.append(self._frame(entry, now_s))
        owes_ack = self._ack_owed >= limits.ACK_EVERY_MESSAGES or (
            self._ack_owed > 0 and now_s - self._ack_owed_since_s >= limits.ACK_DELAY_S
        )
        if not frames and (owes_ack or self.needs_keepalive(now_s)):
            frames.append(self.control_frame(ALIVE, now_s))
        return frames

    def needs_keepalive(self, now_s: float) -> bool:
        """Tell whether nothing was sent in the `limits.KEEPALIVE_S` before `now_s`."""
        return now_s - self._sent_at_s >= limits.KEEPALIVE_S

    def due_in_s(self, now_s: float) -> float:
        """Return the seconds, 0 or more, from `now_s` until `due_frames` has something to send."""
        at_s = self._sent_at_s + limits.KEEPALIVE_S
        if self._ack_owed:
            at_s = min(at_s, self._ack_owed_since_s + limits.ACK_DELAY_S)
        if self._unacked:
            at_s = min(at_s, self._unacked[0].sent_at_s + limits.RESEND_AFTER_S)
        return max(0.0, at_s - now_s)

    def control_frame(self, kind: str, now_s: float) -> Frame:
        """Return a control frame of this kind, such as WELCOME, that also acknowledges messages."""
        self._record_ack_sent(now_s)
        return Frame(0, self.own, self.peer, 0, self._received, kind)

    def is_silent(self, now_s: float) -> bool:
        """Tell whether nothing came from the peer in the `silence_s` before `now_s`.

        Always False while it `may_be_silent`.
        """
        return not self.may_be_silent and now_s - self.last_received_s > self.silence_s

    def becomes_quiet(self, now_s: float) -> bool:
        """Tell, once in every silence of the peer, that half of `silence_s` is over and not all."""
        silent_s = 0.0 if self.may_be_silent else now_s - self.last_received_s
        was_quiet, self._is_quiet = self._is_quiet, silent_s > self.silence_s / 2.0
        return self._is_quiet and not was_quiet and silent_s <= self.silence_s

    def allow_silence(self, now_s: float, *, is_allowed: bool) -> None:
        """Set `may_be_silent`; once silence is not allowed any more, its limit counts from now."""
        if self.may_be_silent and not is_allowed:
            self.last_received_s = now_s
        self.may_be_silent = is_allowed

    def record_send(self, now_s: float, *, is_reachable: bool) -> None:
        """Record whether a connection to the peer existed at a send, for `is_unreachable`.

        Args:
            now_s: the time of the send, in monotonic seconds.
            is_reachable: a connection to the peer existed.
        """
        if is_reachable:
            self._failed_sends = 0
            return
        if self._failed_sends == 0:
            self._unreachable_since_s = now_s
        self._failed_sends += 1

    def matches(self, frame: Frame) -> bool:
        """Tell whether a frame belongs to this session, not to an earlier or later one."""
        return frame.sender == self.peer and frame.receiver == self.own

    def loss_cause(self, now_s: float) -> str:
        """Return why the peer counts as lost at `now_s`: silence or failed sends; "" if not.

        Returns:
            "silent for 10 s", "gone" (without a connection for some time, see `is_unreachable`), or
            "".
        """
        if self.is_silent(now_s):
            return f"silent for {self.silence_s:g} s"
        # A killed process sends no goodbye, but its connection closes.
        return "gone" if self.is_unreachable(now_s) else ""

    def is_unreachable(self, now_s: float) -> bool:
        """Tell whether sends have found no connection for at least `UNREACHABLE_AFTER_S`.

        It takes UNREACHABLE_AFTER_SENDS failed sends in a row; a received frame ends the row.

        Args:
            now_s: the current monotonic time, in seconds.
        """
        if self._failed_sends < UNREACHABLE_AFTER_SENDS:
            return False
        return now_s - self._unreachable_since_s >= UNREACHABLE_AFTER_S

    @property
    def unacknowledged(self) -> int:
        """Number of messages that the peer has not acknowledged."""
        return len(self._unacked)

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes of the messages that the peer has not acknowledged."""
        return self._unacked_bytes

    def _frame(self, entry: _Unacked, now_s: float) -> Frame:
        self._record_ack_sent(now_s)
        return Frame(
            entry.epoch, self.own, self.peer, entry.number, self._received, MESSAGE, entry.body
        )

    def _record_ack_sent(self, now_s: float) -> None:
        self._sent_at_s = now_s
        self._ack_owed = 0

    def _drop_acknowledged(self, acknowledged: int) -> None:
        while self._unacked and self._unacked[0].number <= acknowledged:
            self._unacked_bytes -= len(self._unacked.popleft().body)
