"""The client loop of the load against a real server on loopback."""

import contextlib
import socket
import socketserver
from collections.abc import Iterator

import pytest

from services.commands.bench.load.exchanges import run_exchanges
from tests.support.background_server import run_in_background

_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
_PLAIN = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        size = int(self.rfile.readline())
        name = self.rfile.read(size)
        self.server.seen.append(name[:16])
        if name.startswith(b"refused"):
            self.wfile.write(_PLAIN)
        elif name.startswith(b"silent"):
            self.rfile.read(1)
        else:
            self.wfile.write(_HEAD)
            for piece in (name[:16], b"[DO", b"NE]\n\n", b""):
                data = b"data: " + piece if piece[:3] == b"[DO" else piece
                self.wfile.write(data if piece else b"\r\n0\r\n\r\n")
                self.wfile.flush()
            # Keeps the connection open: the client must stop at the end mark.
            self.rfile.read(1)


def _request(name: bytes) -> bytes:
    return b"%d\n%b" % (len(name), name)


@pytest.fixture
def server() -> Iterator[_Server]:
    """A server that answers with the beginning of the request."""
    running = _Server()
    with run_in_background(running):
        yield running


def test_load_client_receives_complete_answers_in_order_of_its_requests(server: _Server) -> None:
    """Every answer is complete, in the order of requests; the times of its pieces never
    decrease."""
    clients = [[(0.0, _request(b"%d.%d" % (one, each))) for each in range(3)] for one in range(5)]
    done, wall_s = run_exchanges("127.0.0.1", server.server_address[1], clients, 20.0)
    assert wall_s > 0.0
    for one, answers in enumerate(done):
        for each, answer in enumerate(answers):
            whole = b"".join(data for _, data in answer.received)
            assert whole == _HEAD + b"%d.%d" % (one, each) + b"data: [DONE]\n\n\r\n0\r\n\r\n"
            times = [answer.sent_s, *(at_s for at_s, _ in answer.received)]
            assert times == sorted(times)
        assert [answer.sent_s for answer in answers] == sorted(answer.sent_s for answer in answers)


def test_load_client_sends_all_bytes_of_request_larger_than_socket_buffer(server: _Server) -> None:
    """The server receives the whole request, which the client sends in several writes."""
    large = b"x" * 20_000_000
    done, _ = run_exchanges("127.0.0.1", server.server_address[1], [[(0.0, _request(large))]], 30.0)
    assert b"[DONE]" in b"".join(data for _, data in done[0][0].received)


def test_load_client_reads_whole_refusal_that_ends_by_closed_connection(server: _Server) -> None:
    """The body of a refusal without an end mark is complete when the server closes the
    connection."""
    done, _ = run_exchanges(
        "127.0.0.1", server.server_address[1], [[(0.0, _request(b"refused"))]], 20.0
    )
    assert b"".join(data for _, data in done[0][0].received) == _PLAIN


def test_load_client_sends_no_request_before_its_scheduled_time(server: _Server) -> None:
    """A request with a start time is not sent earlier; the order of the clients does not matter."""
    clients = [[(3.0, _request(b"late"))], [(0.0, _request(b"early"))]]
    done, wall_s = run_exchanges("127.0.0.1", server.server_address[1], clients, 20.0)
    assert server.seen == [b"early", b"late"]
    assert done[0][0].sent_s - done[1][0].sent_s >= 1.5
    assert wall_s >= 3.0


def test_load_client_raises_timeout_when_server_sends_no_answer(server: _Server) -> None:
    """A server that accepts the connection and sends nothing makes the client raise a timeout."""
    with pytest.raises(TimeoutError, match="not answered"):
        run_exchanges("127.0.0.1", server.server_address[1], [[(0.0, _request(b"silent"))]], 0.3)


def test_load_client_raises_error_when_server_refuses_connection() -> None:
    """A port on which no process listens makes the client raise an error."""
    with contextlib.closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        with pytest.raises(OSError, match=r"refused|no connection"):
            run_exchanges("127.0.0.1", port, [[(0.0, b"x")]], 5.0)
