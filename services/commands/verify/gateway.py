"""HTTP client of the gateway. Owns requests of `lockstep verify` and the parsing of streams."""

import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from shared.clock import SystemClock
from shared.errors import LockstepError

_EVENT = b"data: "
_END = b"[DONE]"


class NoAnswer(LockstepError):
    """The gateway does not answer, refuses a request, or ends a stream early or with an error."""


class HttpAnswer(Struct, frozen=True, kw_only=True):
    """Completion that the gateway has streamed to its end."""

    text: str
    """The whole completion."""
    tokens: list[str]
    """The text of each token."""
    likeliest: list[dict[str, float]]
    """Per token: text of the likeliest tokens -> natural logarithm of their probabilities."""
    finish_reason: str
    """Why it ended, as the gateway says: "stop" or "length" if nothing went wrong."""
    prompt_tokens: int
    """Length of the prompt, as the gateway counts it."""
    completion_tokens: int
    """Length of the completion, as the gateway counts it."""
    memory_tokens: int
    """Tokens of the prompt that were found in memory."""
    stored_tokens: int
    """Tokens of the prompt that were restored from SSD."""
    first_s: float
    """Seconds from sending to the first event of the stream."""
    seconds: float
    """Seconds from sending to the end mark."""


class Gateway:
    """HTTP client of one gateway, which sends one request per connection."""

    def __init__(self, address: str, model: str, api_key: str, timeout_s: float) -> None:
        """Store the address; nothing is sent.

        Args:
            address: host:port.
            model: name of the model for clients.
            api_key: "" if the gateway needs none.
            timeout_s: seconds without data after which a request fails.
        """
        self.address = address
        self._model = model
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> tuple[int, bytes]:
        """Send a GET request; return HTTP status and body.

        Raises:
            NoAnswer: when the gateway does not answer.
        """
        with self._answer("GET", path, None) as response:
            return response.status, response.read()

    def complete(self, **fields: Any) -> HttpAnswer:
        """Request a streamed completion, read it to its end, and return it.

        Args:
            fields: fields of the request, in place of the default ones: greedy, without drafts,
                and with log probabilities of 5 tokens per position.

        Raises:
            NoAnswer: when it is refused, ends with an error or ends early.
        """
        clock = SystemClock()
        began_s = clock.now()
        with self.started(**fields) as events:
            first = next(events, None)
            first_s = clock.now() - began_s
            received = [] if first is None else [first, *events]
        return parse(received, first_s, clock.now() - began_s)

    @contextlib.contextmanager
    def started(self, **fields: Any) -> Iterator[Iterator[bytes]]:
        """Start a streamed completion; leaving the block closes the connection.

        Args:
            fields: as for `complete`.

        Yields:
            The data of each event, as it arrives.

        Raises:
            NoAnswer: when the gateway does not answer, or refuses the request.
        """
        body = {
            "model": self._model,
            "temperature": 0,
            "seed": 1,
            "speculation": "off",
            "logprobs": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        with self._answer("POST", "/v1/completions", json.dumps(body)) as response:
            if response.status != http.HTTPStatus.OK:
                said = f"refused with {response.status}: {_reason(response.read())}"
                if response.status == http.HTTPStatus.UNAUTHORIZED:
                    said += " Give the key with --api-key or in LOCKSTEP_API_KEY."
                raise NoAnswer(f"The request was {said}")
            yield (line[len(_EVENT) :].strip() for line in response if line.startswith(_EVENT))

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, body: str | None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self.address, timeout=self._timeout_s)
        try:
            connection.request(method, path, body, self._headers)
            yield connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            said = str(error) or type(error).__name__
            raise NoAnswer(f"{method} {path} at {self.address} failed: {said}.") from None
        finally:
            connection.close()


def parse(events: list[bytes], first_s: float, seconds: float) -> HttpAnswer:
    """Parse the events of a streamed completion.

    Args:
        events: the data of each event, the end mark [DONE] included.
        first_s: seconds from sending to the first event.
        seconds: seconds from sending to the last event.

    Raises:
        NoAnswer: when an event is an error, or the end is missing.
    """
    if not events or events[-1] != _END:
        raise NoAnswer(f"The stream broke off after {len(events)} events, without its end mark.")
    texts: list[str] = []
    tokens: list[str] = []
    likeliest: list[dict[str, float]] = []
    finish_reason = ""
    usage: dict[str, Any] = {}
    cache: dict[str, Any] = {}
    for event in events[:-1]:
        value = json.loads(event)
        if "error" in value:
            raise NoAnswer(f"The stream ended with an error: {_reason(event)}")
        usage = value.get("usage") or usage
        cache = (value.get("lockstep") or {}).get("cache") or cache
        for choice in value.get("choices") or []:
            texts.append(choice.get("text") or "")
            finish_reason = choice.get("finish_reason") or finish_reason
            shown = choice.get("logprobs") or {}
            tokens += shown.get("tokens") or []
            likeliest += shown.get("top_logprobs") or []
    if not finish_reason or not usage:
        raise NoAnswer("The stream has no finish_reason, or no usage.")
    return HttpAnswer(
        text="".join(texts),
        tokens=tokens,
        likeliest=likeliest,
        finish_reason=finish_reason,
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        memory_tokens=cache.get("memory_tokens") or 0,
        stored_tokens=cache.get("ssd_tokens") or 0,
        first_s=first_s,
        seconds=seconds,
    )


def _reason(body: bytes) -> str:
    """Return the message of an error's body, or its beginning."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return body[:200].decode(errors="replace")
