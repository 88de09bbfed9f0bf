"""The model that a gateway serves, as its clients see it. Owns the questions to the gateway."""

import contextlib
import dataclasses
import http.client
import json
import urllib.parse
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from shared.errors import UnavailableError, UsageError

ANSWER_S = 10.0
"""Longest wait for an answer in seconds; a loaded gateway may take a while."""

OUTPUT_TOKENS_MAX = 32_000
"""Longest answer that clients are told to request. Coding agents reserve this part of the context
for the answer, so it must not be most of it."""
ANSWER_BYTES_MAX = 1 << 20
"""Most bytes of an answer that are read; lists of models are far shorter."""
_OUTPUT_SHARE = 4
"""An answer may take this part of the context at most: one fourth."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServedModel:
    """A server and its model, with everything that a client's configuration needs."""

    url: str
    """The gateway's URL without a path."""
    key: str
    """API key; "" if the server needs none."""
    name: str
    """Name of the model for requests."""
    context_tokens: int
    """Most tokens of prompt and answer together."""
    codex_catalog: Mapping[str, Any]
    """Facts about the model in the form that Codex reads."""

    @property
    def output_tokens(self) -> int:
        """Longest answer that clients should request, in tokens."""
        return min(OUTPUT_TOKENS_MAX, max(1, self.context_tokens // _OUTPUT_SHARE))


def ask(url: str, key: str, name: str = "") -> ServedModel:
    """Ask a running gateway for its model.

    Args:
        url: the gateway's URL without a path.
        key: API key; "" for none.
        name: name that requests shall use; "": the first that the server lists.

    Raises:
        UnavailableError: when no gateway answers, or its model has not been loaded yet.
        UsageError: when it refuses the key, or has no model of this name.
    """
    # Only with this parameter the list has Codex's catalog too.
    listed = _get(url, "/v1/models?client_version=0", key)
    if not (listed.get("data") and listed.get("models")):
        raise UnavailableError(
            f"The server at {url} is not Lockstep: it lists no models for Codex."
        )
    name = name or str(listed["data"][0]["id"])
    model = _get(url, f"/v1/models/{urllib.parse.quote(name, safe='')}", key)
    context = model.get("max_model_len")
    if not context:
        raise UnavailableError(
            f"The model at {url} is not loaded yet: `lockstep status` shows when it is."
        )
    entries = [dict(one) for one in listed["models"]]
    if name not in [one["slug"] for one in entries]:
        entries.append({**entries[0], "slug": name, "display_name": name})
    return ServedModel(url, key, name, context, {"models": entries})


def _get(server: str, path: str, key: str) -> dict[str, Any]:
    """Return the JSON object at a path of the gateway."""
    status, body = _fetch(server, path, {"Authorization": f"Bearer {key}"} if key else {})
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if status == HTTPStatus.OK and isinstance(found, dict) and found.get("object"):
        return found
    if status == HTTPStatus.UNAUTHORIZED:
        problem = "refuses this API key" if key else "needs an API key"
        raise UsageError(
            f"The server at {server} {problem}: give one with --api-key or in LOCKSTEP_API_KEY."
        )
    try:
        error = found["error"]
        message, code = str(error["message"]), error.get("code")
    except (TypeError, KeyError, AttributeError):
        raise UnavailableError(f"The server at {server} is not Lockstep: GET {path}.") from None
    if code == "model_not_found":
        raise UsageError(message)
    raise UnavailableError(f"The server at {server} refuses to list its models: {message}")


def _fetch(server: str, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    scheme, place = urllib.parse.urlsplit(server)[:2]
    kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
    try:
        connection = kind(place, timeout=ANSWER_S)
        with contextlib.closing(connection):
            connection.request("GET", path, headers=dict(headers))
            response = connection.getresponse()
            return response.status, response.read(ANSWER_BYTES_MAX)
    except (OSError, http.client.HTTPException) as error:
        said = str(error) or type(error).__name__
        raise UnavailableError(
            f"No gateway answers at {server} ({said}): start `lockstep up`, or say with --port, "
            "--config or --url where it is."
        ) from None
