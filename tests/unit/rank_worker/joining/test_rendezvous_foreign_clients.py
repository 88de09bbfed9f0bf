"""Rendezvous with foreign clients and servers: they neither end nor delay it."""

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
"""Allowance for a busy machine. A defect would take minutes."""


@contextlib.contextmanager
def _foreign_server(answer: Callable[[socket.socket, threading.Event], object]) -> Iterator[int]:
    """Serve one client after the other as another program would; yield the port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.1)
        is_over = threading.Event()

        def serve() -> None:
            while not is_over.is_set():
                with contextlib.suppress(OSError), listener.accept()[0] as client:
                    client.recv(64)
                    answer(client, is_over)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            is_over.set()
            thread.join()


@contextlib.contextmanager
def _repeat_meanwhile(*actions: Callable[[], object]) -> Iterator[None]:
    """Repeat actions in threads while the block runs; errors of sockets are ignored."""
    is_over = threading.Event()

    def repeat(action: Callable[[], object]) -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                action()

    threads = [threading.Thread(target=repeat, args=(action,)) for action in actions]
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


def _parse_address(address: str) -> Address:
    """Return (host, port)."""
    host, _, port = address.rpartition(":")
    return host, int(port)


@pytest.mark.proof
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"lockstep"])
def test_foreign_server_at_peer_address_does_not_count_as_rank(answer: bytes) -> None:
    """A foreign server that accepts the connection does not count as a rank."""
    (own,) = free_ports(1)
    with _foreign_server(lambda client, _: client.sendall(answer)) as port:
        rows = [[f"127.0.0.1:{own}"], [f"127.0.0.1:{port}"]]
        (message,) = run_all_rendezvous(ring_orders(rows, SHORT_S)[:1])

    assert f"127.0.0.1:{port} (another program listens there)" in message


def test_server_sending_single_bytes_does_not_extend_rendezvous_deadline() -> None:
    """A foreign server that sends single bytes does not extend the deadline of the rendezvous."""
    (own,) = free_ports(1)
    with _foreign_server(_trickle) as port:
        rows = [[f"127.0.0.1:{own}"], [f"127.0.0.1:{port}"]]
        began_s = time.monotonic()
        (message,) = run_all_rendezvous(ring_orders(rows, SHORT_S)[:1])

    assert f"127.0.0.1:{port} (another program listens there)" in message
    assert time.monotonic() - began_s < SHORT_S + MARGIN_S


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"GET / HTTP/1.1\r\n", b"lockstep 2 1\n", b"lockstep 3 x y\n",
             b"lockstep 3 \xff y\n", b"\x16\x03\x01" * 30, b"x" * 5_000]
)  # fmt: skip
def test_rendezvous_disconnects_foreign_client_and_still_accepts_rank(line: bytes) -> None:
    """A foreign client is disconnected, and the right rank is still accepted."""
    rows = [[f"127.0.0.1:{port}"] for port in free_ports(2)]
    first, second = ring_orders(rows)

    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(run_rendezvous, first)
        with (
            connect_when_listening(_parse_address(rows[0][0])) as foreign_client,
            contextlib.suppress(ConnectionError),
        ):
            foreign_client.sendall(line)
            with contextlib.suppress(OSError):  # it has hung up
                foreign_client.shutdown(socket.SHUT_WR)
            assert foreign_client.recv(64) in (b"", rendezvous_protocol.REFUSED)
        assert not early.done()
        assert run_rendezvous(second) == ""
        assert early.result(LONG_S) == ""


def test_missing_rank_message_names_client_of_other_epoch() -> None:
    """The message about a missing rank names a rank of another epoch that connected."""
    orders, place = star_orders(2, 2 * SHORT_S)
    later = rendezvous_order(
        1, 2, "jaccl", orders[1].environment, orders[1].files, SHORT_S, EPOCH + 1
    )

    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(run_rendezvous, orders[0])
        with connect_when_listening(place) as foreign_client:
            foreign_client.sendall(b"GET / HTTP/1.1\r\n")
            assert foreign_client.recv(64) == b""
        other = run_rendezvous(later)
        message = early.result(LONG_S)

    assert "a rank of another epoch, world or address listens there" in other
    assert "Rank 1 has not reached rank 0" in message
    assert "(127.0.0.1 is a rank of another epoch or world)" in message


def test_ranks_with_different_neighbours_refuse_each_other() -> None:
    """Ranks of one epoch and address, but with other neighbours, refuse each other."""
    own, other, foreign = free_ports(3)
    # The first rank listens for longer than the second one tries to connect.
    first = ring_orders([[f"127.0.0.1:{own}"], [f"127.0.0.1:{other}"]], 2 * SHORT_S)[0]
    second = ring_orders([[f"127.0.0.1:{own}"], [f"127.0.0.1:{foreign}"]], SHORT_S)[1]

    message, foreign_message = run_all_rendezvous([first, second])

    assert "Rank 1 has not reached rank 0" in message
    assert "another epoch or world" in message
    assert f"127.0.0.1:{own} (a rank of another epoch, world or address" in foreign_message


def test_rendezvous_error_keeps_earlier_cause_when_deadline_interrupts_last_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A last attempt cut short by the deadline reports the cause of an earlier attempt."""
    answers = [rendezvous_protocol.REFUSED]

    def answer(client: socket.socket, is_over: threading.Event) -> None:
        if answers:
            client.sendall(answers.pop())
        else:
            is_over.wait()

    with _foreign_server(answer) as port:
        call = RendezvousClient(1, f"127.0.0.1:{port}", b"hello\n", time.monotonic() + LONG_S)
        call.cause, _ = call._try()
        monkeypatch.setattr(call, "_deadline_s", time.monotonic())
        assert call._try() == ("a rank of another epoch, world or address listens there", False)

        # A peer that had the time to answer is reported as silent, also after an earlier answer.
        monkeypatch.setattr(call, "_deadline_s", time.monotonic() + LONG_S)
        monkeypatch.setattr(rendezvous_client, "REPLY_TIMEOUT_S", 0.1)
        assert call._try() == ("no answer", False)


def test_rendezvous_ends_only_after_disconnected_rank_greets_again() -> None:
    """When a rank greets and disconnects, the rendezvous ends only after it has greeted again."""
    orders, place = star_orders(3)

    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(run_rendezvous, orders[0])
        for attempt in (1, 2):
            with connect_when_listening(place) as gone:
                gone.sendall(rendezvous_protocol.greeting(orders[1]))
                if attempt == 2:
                    assert gone.recv(64) == rendezvous_protocol.WELCOME
                    gone.sendall(rendezvous_protocol.CONFIRMATION)
        third = pool.submit(run_rendezvous, orders[2])
        time.sleep(0.5)
        assert not early.done()
        assert not third.done()
        assert run_rendezvous(orders[1]) == ""
        assert [early.result(LONG_S), third.result(LONG_S)] == ["", ""]


def test_error_about_peer_that_ended_mentions_no_firewall() -> None:
    """A peer that ended after its answer is reported as such, without a hint at firewalls."""
    (own,) = free_ports(1)

    def answer(client: socket.socket, _: threading.Event) -> None:
        client.sendall(rendezvous_protocol.WELCOME)
        client.recv(64)

    with _foreign_server(answer) as port:
        rows = [[f"127.0.0.1:{own}"], [f"127.0.0.1:{port}"]]
        (message,) = run_all_rendezvous(ring_orders(rows, SHORT_S)[:1])

    assert f"Rank 1 at 127.0.0.1:{port} has not completed the rendezvous with rank 0" in message
    assert "it answered" in message
    assert "firewall" not in message


@pytest.mark.parametrize("comes", [True, False], ids=["rank-comes", "rank-does-not"])
def test_many_foreign_clients_do_not_delay_rendezvous(comes: bool) -> None:
    """Silent, trickling, repeated and oversized foreign clients do not delay the rendezvous."""
    rows = [[f"127.0.0.1:{port}"] for port in free_ports(2)]
    first, second = ring_orders(rows, LONG_S if comes else 2 * SHORT_S)
    place = _parse_address(rows[0][0])
    silent: list[socket.socket] = []

    def connect_silently() -> None:
        if len(silent) < 100:
            silent.append(socket.create_connection(place, 1.0))
        time.sleep(0.01)

    def trickle() -> None:
        with socket.create_connection(place, 1.0) as link:
            for byte in rendezvous_protocol.greeting(second):
                link.sendall(bytes([byte]))
                time.sleep(0.2)

    def send_wrong_greeting() -> None:
        with socket.create_connection(place, 1.0) as link:
            link.sendall(b"lockstep 2 1 x\n")

    def send_too_much() -> None:
        with socket.create_connection(place, 1.0) as link:
            link.sendall(b"x" * 100_000)
            time.sleep(0.01)

    began_s = time.monotonic()
    with _repeat_meanwhile(connect_silently, trickle, trickle, send_wrong_greeting, send_too_much):
        with ThreadPoolExecutor(1) as pool:
            early = pool.submit(run_rendezvous, first)
            connect_when_listening(place).close()
            time.sleep(0.5)
            assert (run_rendezvous(second) if comes else "") == ""
            message = early.result(LONG_S)
        took_s = time.monotonic() - began_s
    for link in silent:
        link.close()

    assert ("Rank 1 has not reached rank 0" in message) != comes
    assert took_s < (LONG_S / 2 if comes else 2 * SHORT_S + MARGIN_S)


def test_rendezvous_disconnects_silent_client_after_timeout() -> None:
    """A silent client is disconnected after a timeout; beyond the limit, the oldest at once."""
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


def test_rendezvous_greeting_is_valid_only_for_its_world_and_epoch() -> None:
    """A greeting is valid for its epoch and world, which all ranks share, only."""
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
