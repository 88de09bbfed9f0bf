"""Sessions over a channel that loses, repeats and reorders frames."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import limits
from shared.errors import FrameRefused, LinkFull
from shared.identifiers import Incarnation
from shared.transport.delivery import ALIVE, MESSAGE, Frame, Session
from tests.support.effort import cases

ALICE, BOB = Incarnation(11), Incarnation(22)


@dataclasses.dataclass
class Channel:
    """Frames on their way to one side, each with its time of arrival."""

    generator: random.Random
    loss: float
    repeat: float
    delay_max_s: float
    on_the_way: list[tuple[float, int, Frame]] = dataclasses.field(default_factory=list)
    count: int = 0

    def put(self, frame: Frame, now_s: float) -> None:
        """Send a frame, which arrives never, once or twice, after a random delay."""
        if self.generator.random() < self.loss:
            return
        for _ in range(2 if self.generator.random() < self.repeat else 1):
            self.count += 1
            due_s = now_s + self.generator.uniform(0.0, self.delay_max_s)
            self.on_the_way.append((due_s, self.count, frame))

    def take(self, now_s: float) -> list[Frame]:
        """Return the frames that have arrived."""
        arrived = sorted(entry for entry in self.on_the_way if entry[0] <= now_s)
        self.on_the_way = [entry for entry in self.on_the_way if entry[0] > now_s]
        return [frame for _, _, frame in arrived]


class Pair:
    """Two connected sessions, and the bodies that each has delivered."""

    def __init__(self, seed: int, loss: float, repeat: float, delay_max_s: float) -> None:
        generator = random.Random(seed)
        self.now_s = 100.0
        self.sessions = (Session(ALICE, BOB, self.now_s), Session(BOB, ALICE, self.now_s))
        self.channels = [Channel(generator, loss, repeat, delay_max_s) for _ in range(2)]
        self.delivered: tuple[list[bytes], list[bytes]] = ([], [])

    def send(self, side: int, body: bytes) -> None:
        """Send a message from one side to the other."""
        self.channels[1 - side].put(self.sessions[side].send(1, body, self.now_s), self.now_s)

    def pass_time(self, seconds: float) -> None:
        """Advance the time in steps of 10 ms; in each, frames arrive and due frames are sent."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 0.01
            for side in (0, 1):
                for frame in self.channels[side].take(self.now_s):
                    if self.sessions[side].receive(frame, self.now_s):
                        self.delivered[side].append(frame.body)
                for frame in self.sessions[side].due_frames(self.now_s):
                    self.channels[1 - side].put(frame, self.now_s)


@settings(max_examples=cases(10, 40))
@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.05, 0.3, 0.6]),
    repeat=st.sampled_from([0.0, 0.3]),
    delay_max_s=st.sampled_from([0.0, 0.03, 0.5]),
    count=st.integers(0, 40),
)
def test_session_over_faulty_channel_delivers_every_message_once_in_order(
    seed: int, loss: float, repeat: float, delay_max_s: float, count: int
) -> None:
    """When a faulty channel works again, each side has every message of the other."""
    pair = Pair(seed, loss, repeat, delay_max_s)
    sent = [f"message {number}".encode() for number in range(count)]

    for body in sent:
        pair.send(0, body)
        pair.send(1, body)
        pair.pass_time(0.02)
    for channel in pair.channels:
        channel.loss = channel.delay_max_s = 0.0
    pair.pass_time(2.0 + 2 * limits.RESEND_AFTER_S)

    assert pair.delivered == (sent, sent)
    assert [session.unacknowledged for session in pair.sessions] == [0, 0]


def test_session_over_channel_without_faults_resends_nothing() -> None:
    """On a healthy link no message is sent twice, and every message is acknowledged soon."""
    pair = Pair(seed=1, loss=0.0, repeat=0.0, delay_max_s=0.005)

    for number in range(500):
        pair.send(0, str(number).encode())
        pair.pass_time(0.01)
    pair.pass_time(2 * limits.ACK_DELAY_S)

    assert pair.sessions[0].resent == 0
    assert pair.sessions[0].unacknowledged == 0
    assert pair.sessions[1].gaps == pair.sessions[1].duplicates == 0


def test_session_resends_at_most_one_batch_before_acknowledgement() -> None:
    """The next batch is sent again only when the previous one is acknowledged."""
    session = Session(ALICE, BOB, 0.0)
    for _ in range(1_000):
        session.send(1, b"x", 0.0)

    first = session.due_frames(limits.RESEND_AFTER_S)
    soon = session.due_frames(limits.RESEND_AFTER_S + 0.01)
    batch = limits.RESEND_MESSAGES_MAX
    session.receive(Frame(0, BOB, ALICE, 0, batch, ALIVE), limits.RESEND_AFTER_S + 0.02)
    second = session.due_frames(limits.RESEND_AFTER_S + 0.02)

    assert [frame.number for frame in first] == list(range(1, batch + 1))
    assert soon == []
    assert [frame.number for frame in second] == list(range(batch + 1, 2 * batch + 1))


def test_session_reports_silent_peer_only_after_limit_without_received_frames() -> None:
    """A session reports silence when nothing has arrived for the limit, and not before."""
    pair = Pair(seed=1, loss=0.0, repeat=0.0, delay_max_s=0.0)
    pair.pass_time(1.0)
    pair.channels[0].loss = 1.0

    pair.pass_time(limits.PEER_SILENCE_S - 1.0)
    assert not pair.sessions[0].is_silent(pair.now_s)
    pair.pass_time(2.0)

    assert pair.sessions[0].is_silent(pair.now_s)
    assert not pair.sessions[1].is_silent(pair.now_s)


def test_session_without_messages_reports_no_silent_peer_while_keepalives_arrive() -> None:
    """Keepalives that arrive keep a session without messages from reporting silence."""
    pair = Pair(seed=1, loss=0.0, repeat=0.0, delay_max_s=0.0)

    pair.pass_time(3 * limits.PEER_SILENCE_S)

    assert not any(session.is_silent(pair.now_s) for session in pair.sessions)


def test_send_is_refused_at_maximum_of_unacknowledged_messages() -> None:
    """A refused message gets no number."""
    session = Session(ALICE, BOB, 0.0)
    for _ in range(limits.UNACKED_MESSAGES_MAX):
        session.send(1, b"x", 0.0)

    with pytest.raises(LinkFull, match="not acknowledged"):
        session.send(1, b"one too many", 0.0)

    acknowledges_all = Frame(0, BOB, ALICE, 0, limits.UNACKED_MESSAGES_MAX, ALIVE)
    session.receive(acknowledges_all, 0.0)
    assert session.send(1, b"next", 0.0).number == limits.UNACKED_MESSAGES_MAX + 1


def test_send_is_refused_at_maximum_of_unacknowledged_bytes() -> None:
    """Memory is limited by bytes too, not only by the number of messages."""
    session = Session(ALICE, BOB, 0.0)
    body = bytes(limits.UNACKED_BYTES_MAX // 4)
    for _ in range(4):
        session.send(1, body, 0.0)

    with pytest.raises(LinkFull, match="bytes"):
        session.send(1, b"x", 0.0)


def test_send_refuses_message_over_size_limit() -> None:
    """A peer would close the connection on such a message, and all later messages would wait for
    it."""
    session = Session(ALICE, BOB, 0.0)

    with pytest.raises(LinkFull, match="longer than any peer accepts"):
        session.send(1, bytes(limits.MESSAGE_BYTES_MAX + 1), 0.0)
    assert session.unacknowledged == 0
    assert session.send(1, b"x", 0.0).number == 1


def test_session_refuses_acknowledgement_of_message_it_has_not_sent() -> None:
    """A peer cannot make a session forget messages that it will send later."""
    session = Session(ALICE, BOB, 0.0)
    session.send(1, b"x", 0.0)

    with pytest.raises(FrameRefused, match="never sent"):
        session.receive(Frame(0, BOB, ALICE, 0, 2, ALIVE), 0.0)

    assert session.unacknowledged == 1


def test_session_drops_message_after_gap_until_it_is_resent() -> None:
    """The protocol is go-back-N: no message is delivered or stored out of order."""
    session = Session(BOB, ALICE, 0.0)

    assert not session.receive(Frame(1, ALICE, BOB, 2, 0, MESSAGE, b"second"), 0.0)
    assert session.receive(Frame(1, ALICE, BOB, 1, 0, MESSAGE, b"first"), 0.0)
    assert session.receive(Frame(1, ALICE, BOB, 2, 0, MESSAGE, b"second"), 0.0)
    assert not session.receive(Frame(1, ALICE, BOB, 2, 0, MESSAGE, b"second"), 0.0)
    assert (session.gaps, session.duplicates) == (1, 1)


def test_session_tells_once_that_half_of_silence_limit_is_over() -> None:
    """A silence is announced once, halfway to its end; a frame begins a new one; a peer that may be
    silent is not announced."""
    session = Session(ALICE, BOB, 0.0)
    session.silence_s = 30.0

    told_at_s = [at for at in range(31) if session.becomes_quiet(at)]
    assert told_at_s == [16]
    session.receive(Frame(0, BOB, ALICE, 0, 0, "alive"), 31.0)
    assert [at for at in range(31, 62) if session.becomes_quiet(at)] == [47]
    assert not session.is_silent(61.0)
    assert session.loss_cause(61.5) == "silent for 30 s"

    session.allow_silence(62.0, is_allowed=True)
    assert not any(session.becomes_quiet(at) for at in range(62, 200))
