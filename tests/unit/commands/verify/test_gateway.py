"""How `lockstep verify` reads streams, and what it says of those that break off."""

import http.server
import io
from collections.abc import Iterator

import pytest

from services.commands.verify import command
from services.commands.verify.gateway import Gateway, NoAnswer, parse
from services.supervisor.console.console import Console
from shared.configuration.settings import Config
from shared.errors import UsageError
from tests.background_server import run_in_background
from tests.unit.commands.verify.recorded import WORDS, events


def test_a_stream_is_read_whole() -> None:
    """Text, tokens with their alternatives, end, usage and what the cache gave."""
    answer = parse(events(), 0.1, 0.5)
    assert (answer.text, answer.tokens) == ("".join(WORDS), list(WORDS))
    assert answer.likeliest[0] == {" red": -0.1, " green": -2.5}
    assert (answer.finish_reason, answer.completion_tokens) == ("length", 5)
    assert (answer.memory_tokens, answer.stored_tokens) == (4, 1)
    assert (answer.first_s, answer.seconds) == (0.1, 0.5)


@pytest.mark.parametrize(
    ("received", "words"),
    [
        ([], "broke off after 0 events"),
        (events()[:-1], "without its end mark"),
        ([b'{"error": {"message": "The world is lost."}}', b"[DONE]"], "The world is lost."),
        ([*events()[:5], b"[DONE]"], "no finish_reason"),
    ],
)
def test_streams_that_do_not_end_properly(received: list[bytes], words: str) -> None:
    """Each is an error with its reason, never half an answer."""
    with pytest.raises(NoAnswer, match=words):
        parse(received, 0.0, 0.0)


class _Server(http.server.BaseHTTPRequestHandler):
    """Answers 401 to whoever has no key, and a stream to whoever has."""

    def do_POST(self) -> None:
        """Answer a completion."""
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != "Bearer secret":
            self._send(401, b'{"error": {"message": "A key is needed."}}')
            return
        self._send(200, b"".join(b"data: " + one + b"\n\n" for one in events()))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""

    def _send(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def address() -> Iterator[str]:
    """Where the server listens."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    with run_in_background(server):
        yield f"127.0.0.1:{server.server_address[1]}"


def test_the_api_key_is_sent(address: str) -> None:
    """With it a completion comes; without it the refusal's own words do."""
    assert Gateway(address, "m", "secret", 5.0).complete(prompt="x").tokens == list(WORDS)
    with pytest.raises(NoAnswer, match=r"refused with 401: A key is needed\. Give the key"):
        Gateway(address, "m", "", 5.0).complete(prompt="x")


def test_nobody_there_is_said() -> None:
    """The address and the system's words."""
    with pytest.raises(NoAnswer, match=r"GET /livez at 127\.0\.0\.1:1 failed"):
        Gateway("127.0.0.1:1", "m", "", 1.0).get("/livez")


@pytest.mark.parametrize("key", ["two\nlines", "schlüssel"], ids=["lines", "letters"])
def test_a_key_that_cannot_be_one_is_refused(key: str) -> None:
    """Before anybody is asked, and the sentence does not show it."""
    options = command.VerifyOptions(api_key=key)

    with pytest.raises(UsageError) as refused:
        command.run(Config(), options, Console(io.StringIO()))

    assert key not in str(refused.value)
