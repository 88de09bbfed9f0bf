"""Reading of streams by `lockstep verify`, and the errors of incomplete ones."""

import http.server
import io
from collections.abc import Iterator

import pytest

from services.commands.verify import command
from services.commands.verify.gateway import Gateway, NoAnswer, parse
from services.supervisor.console.console import Console
from shared.configuration.settings import Config
from shared.errors import UsageError
from tests.support.background_server import run_in_background
from tests.unit.commands.verify.recorded import WORDS, stream_events


def test_verify_reads_text_tokens_finish_reason_and_usage_from_stream() -> None:
    """The answer has text, tokens with alternatives, finish reason, usage and cache counts."""
    answer = parse(stream_events(), 0.1, 0.5)
    assert (answer.text, answer.tokens) == ("".join(WORDS), list(WORDS))
    assert answer.likeliest[0] == {" red": -0.1, " green": -2.5}
    assert (answer.finish_reason, answer.completion_tokens) == ("length", 5)
    assert (answer.memory_tokens, answer.stored_tokens) == (4, 1)
    assert (answer.first_s, answer.seconds) == (0.1, 0.5)


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        ([], "broke off after 0 events"),
        (stream_events()[:-1], "without its end mark"),
        ([b'{"error": {"message": "The world is lost."}}', b"[DONE]"], "The world is lost."),
        ([*stream_events()[:5], b"[DONE]"], "no finish_reason"),
    ],
)
def test_verify_raises_error_with_reason_when_stream_is_incomplete(
    received: list[bytes], expected: str
) -> None:
    """An incomplete stream raises NoAnswer with the reason."""
    with pytest.raises(NoAnswer, match=expected):
        parse(received, 0.0, 0.0)


class _GatewayRequiringKey(http.server.BaseHTTPRequestHandler):
    """Answers 401 to requests without the key, and a stream to requests with it."""

    def do_POST(self) -> None:
        """Answer a completion."""
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != "Bearer secret":
            self._send(401, b'{"error": {"message": "A key is needed."}}')
            return
        self._send(200, b"".join(b"data: " + one + b"\n\n" for one in stream_events()))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing."""

    def _send(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def address() -> Iterator[str]:
    """Start the server and return its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _GatewayRequiringKey)
    with run_in_background(server):
        yield f"127.0.0.1:{server.server_address[1]}"


def test_verify_sends_api_key_and_quotes_refusal_without_it(address: str) -> None:
    """The key leads to a completion; without it the error quotes the refusal."""
    assert Gateway(address, "m", "secret", 5.0).complete(prompt="x").tokens == list(WORDS)
    with pytest.raises(NoAnswer, match=r"refused with 401: A key is needed\. Give the key"):
        Gateway(address, "m", "", 5.0).complete(prompt="x")


def test_verify_error_names_address_of_unreachable_gateway() -> None:
    """The error names the request, the address and the system's reason."""
    with pytest.raises(NoAnswer, match=r"GET /livez at 127\.0\.0\.1:1 failed"):
        Gateway("127.0.0.1:1", "m", "", 1.0).get("/livez")


@pytest.mark.parametrize("key", ["two\nlines", "schlüssel"], ids=["lines", "letters"])
def test_verify_refuses_malformed_api_key_before_any_request(key: str) -> None:
    """The error does not contain the key."""
    options = command.VerifyOptions(api_key=key)

    with pytest.raises(UsageError) as refused:
        command.run(Config(), options, Console(io.StringIO()))

    assert key not in str(refused.value)
