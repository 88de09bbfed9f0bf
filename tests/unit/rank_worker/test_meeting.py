"""The ranks meet before MLX joins them; what keeps them apart is named. Real sockets."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest

from services.rank_worker import meeting
from shared.errors import RanksApart
from shared.messages import JoinWorld

SHORT_S = 1.0
LONG_S = 30.0


def _ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


def _order(
    rank: int,
    size: int,
    backend: Literal["ring", "nccl", "jaccl", "off"] = "ring",
    environment: dict[str, str] | None = None,
    files: dict[str, str] | None = None,
    limit_s: float = LONG_S,
    epoch: int = 3,
) -> JoinWorld:
    return JoinWorld(
        epoch=epoch,
        rank=rank,
        world_size=size,
        backend=backend,
        environment=environment or {},
        files=files or {},
        synchronization="broadcast",
        receipt_logits=False,
        init_deadline_s=limit_s / meeting.MEETING_SHARE,
        load_deadline_s=1.0,
        step_deadline_max_s=1.0,
    )


def _ring(rows: list[list[str]], limit_s: float = LONG_S) -> list[JoinWorld]:
    files = {"MLX_HOSTFILE": json.dumps(rows)}
    size = len(rows)
    return [_order(rank, size, files=files, limit_s=limit_s) for rank in range(size)]


def _meet_all(orders: list[JoinWorld]) -> list[str]:
    """Let all meet at once; return what each of them says, "" if nothing is wrong."""

    def one(order: JoinWorld) -> str:
        try:
            meeting.meet(order)
        except RanksApart as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(orders)) as pool:
        return list(pool.map(one, orders))


@pytest.mark.parametrize(("size", "connections"), [(1, 1), (2, 1), (2, 3), (4, 1)])
def test_a_ring_meets(size: int, connections: int) -> None:
    """Everybody lets its left neighbour in and is let in by the right one, over each address."""
    ports = _ports(size * connections)
    rows = [[f"127.0.0.1:{ports.pop()}" for _ in range(connections)] for _ in range(size)]

    assert _meet_all(_ring(rows)) == [""] * size
    # All of it is closed again: MLX can listen there.
    for address in (address for row in rows for address in row):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", int(address.rpartition(":")[2])))
            listener.listen()


@pytest.mark.parametrize("backend", ["jaccl", "nccl"])
def test_a_star_meets_at_rank_0(backend: Literal["jaccl", "nccl"]) -> None:
    """jaccl's coordinator and NCCL's root: the others come to rank 0."""
    (port,) = _ports(1)
    environment = {
        "MLX_JACCL_COORDINATOR": f"127.0.0.1:{port}",
        "NCCL_HOST_IP": "127.0.0.1",
        "NCCL_PORT": str(port),
        "MLX_WORLD_SIZE": "3",
    }
    files = {"MLX_IBV_DEVICES": json.dumps([[None] * 3] * 3)}

    orders = [_order(rank, 3, backend, environment, files) for rank in range(3)]
    assert _meet_all(orders) == ["", "", ""]


def test_a_launchers_world_is_left_alone() -> None:
    """An order without an environment has nobody to meet; neither has a rank that is alone."""
    meeting.meet(_order(0, 2))
    meeting.meet(_order(0, 2, "jaccl"))
    meeting.meet(_order(0, 2, "nccl"))
    meeting.meet(_order(0, 1, "off"))


def test_a_rank_that_is_not_there_is_named_by_both_sides() -> None:
    """Who cannot be reached, where, why; and who has not come."""
    own, other = _ports(2)
    rows = [[f"127.0.0.1:{own}"], [f"127.0.0.1:{other}"]]

    (said,) = _meet_all(_ring(rows, SHORT_S)[:1])

    assert f"cannot reach rank 1 at 127.0.0.1:{other} (Connection refused)" in said
    assert f"let port {other} through?" in said
    assert f"Rank 1 has not reached rank 0 on {socket.gethostname()}" in said
    assert f"at 127.0.0.1:{own} within 1 s." in said


def test_only_those_who_are_missing_are_named() -> None:
    """Of three ranks of a star one never comes: rank 0 names that one."""
    (port,) = _ports(1)
    environment = {"MLX_JACCL_COORDINATOR": f"127.0.0.1:{port}"}
    files = {"MLX_IBV_DEVICES": json.dumps([[None] * 3] * 3)}
    orders = [_order(rank, 3, "jaccl", environment, files, SHORT_S) for rank in range(2)]

    said, nothing = _meet_all(orders)

    assert nothing == ""
    assert "Rank 2 has not reached rank 0" in said
    assert "Rank 1" not in said


def test_a_late_rank_is_waited_for() -> None:
    """Processes do not start at the same moment."""
    rows = [[f"127.0.0.1:{port}"] for port in _ports(2)]
    first, second = _ring(rows)

    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(meeting.meet, first)
        time.sleep(0.3)
        meeting.meet(second)
        early.result(LONG_S)


def test_a_name_that_nobody_knows_is_named() -> None:
    """The resolver's words stand behind the address."""
    (own,) = _ports(1)
    rows = [[f"127.0.0.1:{own}"], ["no-such-host.invalid:7"]]

    (said,) = _meet_all(_ring(rows, SHORT_S)[:1])

    assert "rank 1 at no-such-host.invalid:7 (" in said


def test_a_port_that_is_taken_is_named_at_once() -> None:
    """By its number, its rank and the settings that say it; nothing is waited for."""
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        rows = [[f"127.0.0.1:{port}"], ["127.0.0.1:9"]]

        with pytest.raises(RanksApart, match=f"Port {port} .*rank 0 .*is taken.*world.hostfile"):
            meeting.meet(_ring(rows)[0])


def test_an_address_of_another_machine_is_named_at_once() -> None:
    """A rank that was started on the wrong machine hears which one it should be."""
    rows = [["127.0.0.1:9"], ["192.0.2.7:5000"]]

    with pytest.raises(RanksApart, match=r"192\.0\.2\.7:5000 is for rank 1 .*--rank 1.*hostfile"):
        meeting.meet(_ring(rows)[1])


@contextlib.contextmanager
def _service(answer: bytes) -> Iterator[int]:
    """Listen as some other program would, and answer everybody the same."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.1)
        is_over = threading.Event()

        def serve() -> None:
            while not is_over.is_set():
                with contextlib.suppress(OSError), listener.accept()[0] as visitor:
                    visitor.recv(64)
                    visitor.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        is_over.set()
        thread.join()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_another_service_at_a_peers_address_is_no_rank(answer: bytes) -> None:
    """A connection alone proves nothing."""
    (own,) = _ports(1)
    with _service(answer) as port:
        rows = [[f"127.0.0.1:{own}"], [f"127.0.0.1:{port}"]]
        (said,) = _meet_all(_ring(rows, SHORT_S)[:1])

    assert f"127.0.0.1:{port} (somebody else listens there)" in said


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"GET / HTTP/1.1\r\n", b"lockstep 2 1\n", b"lockstep 3 0\n",
             b"lockstep 3 x\n", b"x" * 5_000]
)  # fmt: skip
def test_strangers_are_let_out_again(line: bytes) -> None:
    """A port scan, another epoch or another rank changes nothing: the right one still comes in."""
    rows = [[f"127.0.0.1:{port}"] for port in _ports(2)]
    first, second = _ring(rows)

    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(meeting.meet, first)
        address = ("127.0.0.1", int(rows[0][0].rpartition(":")[2]))
        with _connected(address) as stranger, contextlib.suppress(OSError):
            stranger.sendall(line)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(64) == b""
        assert not early.done()
        meeting.meet(second)
        early.result(LONG_S)


def _connected(address: tuple[str, int]) -> socket.socket:
    until_s = time.monotonic() + LONG_S
    while True:
        try:
            return socket.create_connection(address, 5.0)
        except ConnectionRefusedError:
            assert time.monotonic() < until_s
            time.sleep(0.01)
