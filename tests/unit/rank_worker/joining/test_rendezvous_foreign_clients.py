"""What else comes to the port at which ranks meet: it neither ends nor holds up a meeting."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.rank_worker.joining import rendezvous_client, rendezvous_protocol
from services.rank_worker.joining.rendezvous_client import RendezvousClient
from services.rank_worker.joining.rendezvous_server import PENDING_PEERS_MAX
from tests.unit.rank_worker.joining.rendezvous_peers import (
    EPOCH,
    LONG_S,
    SHORT_S,
    Address,
    connect_when_listening,
    free_ports,
    rendezvous_order,
    ring_orders,
    run_all_rendezvous,
    run_rendezvous,
    star_orders,
)

MARGIN_S = 5.0
"""A busy machine is late; what is tested here once lasted for minutes, or for ever."""


@contextlib.contextmanager
def _service(answer: Callable[[socket.socket, threading.Event], object]) -> Iterator[int]:
    """Listen as some other program would, and answer one visitor after the other."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.1)
        is_over = threading.Event()

        def serve() -> None:
            while not is_over.is_set():
                with contextlib.suppress(OSError), listener.accept()[0] as visitor:
                    visitor.recv(64)
                    answer(visitor, is_over)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            is_over.set()
            thread.join()


@contextlib.contextmanager
def _meanwhile(*deeds: Callable[[], object]) -> Iterator[None]:
    """Do things again and again while the block runs; what fails is tried again."""
    is_over = threading.Event()

    def repeat(deed: Callable[[], object]) -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                deed()

    threads = [threading.Thread(target=repeat, args=(deed,)) for deed in deeds]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _trickle(link: socket.socket, is_over: threading.Event) -> None:
    while not is_over.is_set():
        link.sendall(b"l")
        time.sleep(0.05)


def _place(address: str) -> Address:
    host, _, port = address.rpartition(":")
    return host, int(port)


@pytest.mark.proof
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"lockstep"])
def test_another_service_at_a_peers_address_is_no_rank(answer: bytes) -> None:
    """A connection alone proves nothing."""
    (own,) = free_ports(1)
    with _service(lambda visitor, _: visitor.sendall(answer)) as port:
        rows = [[f"127.0.0.1:{own}"], [f"127.0.0.1:{port}"]]
        (said,) = run_all_rendezvous(ring_orders(rows, SHORT_S)[:1])

    assert f"127.0.0.1:{port} (another program listens there)" in said


def test_a_service_that_trickles_holds_nobody() -> None:
    """A byte now and then, for ever: the deadline is that of the meeting, not of each byte."""
    (own,) = free_ports(1)
    with _service(_trickle) as port:
        rows = [[f"127.0.0.1:{own}"], [f"127.0.0.1:{port}"]]
        began_s = time.monotonic()
        (said,) = run_all_rendezvous(ring_orders(rows, SHORT_S)[:1])

    assert f"127.0.0.1:{port} (another program listens there)" in said
    assert time.monotonic() - began_s < SHORT_S + MARGIN_S


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"GET / HTTP/1.1\r\n", b"lockstep 2 1\n", b"lockstep 3 x y\n",
             b"lockstep 3 \xff y\n", b"\x16\x03\x01" * 30, b"x" * 5_000]
)  # fmt: skip
def test_strangers_are_let_out_again(line: bytes) -> None:
    """A port scan or another program changes nothing: the right one still comes in."""
    rows = [[f"127.0.0.1:{port}"] for port in free_ports(2)]
    first, second = ring_orders(rows)

    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(run_rendezvous, first)
        with (
            connect_when_listening(_place(rows[0][0])) as stranger,
            contextlib.suppress(ConnectionError),
        ):
            stranger.sendall(line)
            with contextlib.suppress(OSError):  # it has hung up
                stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(64) in (b"", rendezvous_protocol.REFUSED)
        assert not early.done()
        assert run_rendezvous(second) == ""
        assert early.result(LONG_S) == ""


def test_who_comes_instead_is_named() -> None:
    """Rank 1 does not come; a scanner and a rank of another epoch do."""
    orders, place = star_orders(2, 2 * SHORT_S)
    later = rendezvous_order(
        1, 2, "jaccl", orders[1].environment, orders[1].files, SHORT_S, EPOCH + 1
    )

    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(run_rendezvous, orders[0])
        with connect_when_listening(place) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n")
            assert stranger.recv(64) == b""
        other = run_rendezvous(later)
        said = early.result(LONG_S)

    assert "a rank of another epoch, world or address listens there" in other
    assert "Rank 1 has not reached rank 0" in said
    assert "(127.0.0.1 is a rank of another epoch or world)" in said


def test_ranks_of_two_worlds_do_not_meet() -> None:
    """The same epoch and rank, at the same address, but with another neighbour: another world."""
    own, other, foreign = free_ports(3)
    # The door of the first is open for longer than the second calls.
    first = ring_orders([[f"127.0.0.1:{own}"], [f"127.0.0.1:{other}"]], 2 * SHORT_S)[0]
    second = ring_orders([[f"127.0.0.1:{own}"], [f"127.0.0.1:{foreign}"]], SHORT_S)[1]

    said, foreign_said = run_all_rendezvous([first, second])

    assert "Rank 1 has not reached rank 0" in said
    assert "another epoch or world" in said
    assert f"127.0.0.1:{own} (a rank of another epoch, world or address" in foreign_said


def test_a_call_that_the_end_cuts_off_takes_nothing_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last call may have a moment only: what an earlier one has heard is said, not silence."""
    answers = [rendezvous_protocol.REFUSED]

    def answer(visitor: socket.socket, is_over: threading.Event) -> None:
        if answers:
            visitor.sendall(answers.pop())
        else:
            is_over.wait()

    with _service(answer) as port:
        call = RendezvousClient(1, f"127.0.0.1:{port}", b"hello\n", time.monotonic() + LONG_S)
        call.cause, _ = call._try()
        monkeypatch.setattr(call, "_deadline_s", time.monotonic())
        assert call._try() == ("a rank of another epoch, world or address listens there", False)

        # Who has had its time to answer is silent, whatever it said before.
        monkeypatch.setattr(call, "_deadline_s", time.monotonic() + LONG_S)
        monkeypatch.setattr(rendezvous_client, "REPLY_TIMEOUT_S", 0.1)
        assert call._try() == ("no answer", False)


def test_a_greeting_of_who_has_given_up_does_not_count() -> None:
    """It may lie in a buffer for long; the rank calls again, and is answered then.

    Once it counted, the door was closed, and the rank that called again was refused until the end.
    """
    orders, place = star_orders(3)

    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(run_rendezvous, orders[0])
        for words in (1, 2):
            with connect_when_listening(place) as gone:
                gone.sendall(rendezvous_protocol.greeting(orders[1]))
                if words == 2:
                    assert gone.recv(64) == rendezvous_protocol.WELCOME
                    gone.sendall(rendezvous_protocol.CONFIRMATION)
        third = pool.submit(run_rendezvous, orders[2])
        time.sleep(0.5)
        assert not early.done()
        assert not third.done()
        assert run_rendezvous(orders[1]) == ""
        assert [early.result(LONG_S), third.result(LONG_S)] == ["", ""]


def test_a_peer_that_answers_and_is_gone_is_no_matter_of_firewalls() -> None:
    """It has ended after its answer: that is what is said, not that nobody can be reached."""
    (own,) = free_ports(1)

    def answer(visitor: socket.socket, _: threading.Event) -> None:
        visitor.sendall(rendezvous_protocol.WELCOME)
        visitor.recv(64)

    with _service(answer) as port:
        rows = [[f"127.0.0.1:{own}"], [f"127.0.0.1:{port}"]]
        (said,) = run_all_rendezvous(ring_orders(rows, SHORT_S)[:1])

    assert f"Rank 1 at 127.0.0.1:{port} has not completed the rendezvous with rank 0" in said
    assert "it answered" in said
    assert "firewall" not in said


@pytest.mark.parametrize("comes", [True, False], ids=["rank-comes", "rank-does-not"])
def test_a_crowd_holds_nobody_up(comes: bool) -> None:
    """Some say nothing, some a byte now and then, some call again and again, one says too much."""
    rows = [[f"127.0.0.1:{port}"] for port in free_ports(2)]
    first, second = ring_orders(rows, LONG_S if comes else 2 * SHORT_S)
    place = _place(rows[0][0])
    silent: list[socket.socket] = []

    def be_silent() -> None:
        if len(silent) < 100:
            silent.append(socket.create_connection(place, 1.0))
        time.sleep(0.01)

    def trickle() -> None:
        with socket.create_connection(place, 1.0) as link:
            for byte in rendezvous_protocol.greeting(second):
                link.sendall(bytes([byte]))
                time.sleep(0.2)

    def call_again() -> None:
        with socket.create_connection(place, 1.0) as link:
            link.sendall(b"lockstep 2 1 x\n")

    def say_too_much() -> None:
        with socket.create_connection(place, 1.0) as link:
            link.sendall(b"x" * 100_000)
            time.sleep(0.01)

    began_s = time.monotonic()
    with _meanwhile(be_silent, trickle, trickle, call_again, say_too_much):
        with ThreadPoolExecutor(1) as pool:
            early = pool.submit(run_rendezvous, first)
            connect_when_listening(place).close()
            time.sleep(0.5)
            assert (run_rendezvous(second) if comes else "") == ""
            said = early.result(LONG_S)
        took_s = time.monotonic() - began_s
    for link in silent:
        link.close()

    assert ("Rank 1 has not reached rank 0" in said) != comes
    assert took_s < (LONG_S / 2 if comes else 2 * SHORT_S + MARGIN_S)


def test_who_says_nothing_is_let_out() -> None:
    """After a moment; and at once, the oldest first, when there are too many of them."""
    orders, place = star_orders(2)

    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        early = pool.submit(run_rendezvous, orders[0])
        silent = [
            stack.enter_context(connect_when_listening(place)) for _ in range(PENDING_PEERS_MAX + 2)
        ]
        began_s = time.monotonic()
        ends_s = []
        for link in (silent[0], silent[1], silent[-1]):
            link.settimeout(LONG_S)
            assert link.recv(1) == b""
            ends_s.append(time.monotonic() - began_s)
        assert run_rendezvous(orders[1]) == ""
        assert early.result(LONG_S) == ""

    assert ends_s[2] - ends_s[1] > rendezvous_protocol.REPLY_TIMEOUT_S / 2
    assert ends_s[2] < rendezvous_protocol.REPLY_TIMEOUT_S + MARGIN_S


def test_a_greeting_names_its_world() -> None:
    """Epoch, rank, and what all ranks of a world share: addresses, not their own variables."""
    files = {"MLX_HOSTFILE": json.dumps([["a:1"], ["b:1"]])}
    own = rendezvous_order(0, 2, environment={"MLX_RANK": "0"}, files=files)
    peer = rendezvous_order(1, 2, environment={"MLX_RANK": "1"}, files=files)
    line = rendezvous_protocol.greeting(peer)

    assert rendezvous_protocol.parse_greeting(line, own) == 1
    assert rendezvous_protocol.parse_greeting(line[:-1], own) == "invalid"
    assert rendezvous_protocol.parse_greeting(b"lockstep 3 1\n", own) == "invalid"
    assert (
        rendezvous_protocol.parse_greeting(
            line, rendezvous_order(0, 2, files=files, epoch=EPOCH + 1)
        )
        == "other"
    )
    assert rendezvous_protocol.parse_greeting(line, rendezvous_order(0, 3, files=files)) == "other"
    assert rendezvous_protocol.parse_greeting(line, rendezvous_order(0, 2, files={})) == "other"
    assert len(rendezvous_protocol.incomplete(list(range(64)))) < rendezvous_protocol.LINE_BYTES_MAX
