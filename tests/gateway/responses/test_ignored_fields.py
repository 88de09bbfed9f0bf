"""The page of ignored and refused fields is true: every example is sent to every endpoint."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from services.gateway.dialects.messages import request_types as messages_requests
from services.gateway.dialects.openai import field_rules, tokens
from services.gateway.dialects.responses import reading
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import reply_with

_PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "ignored-fields.md"
_HELLO = [{"role": "user", "content": "Hello"}]
_REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": _HELLO}),
    "completions": ("/v1/completions", {"prompt": "Hello"}),
    "messages": ("/v1/messages", {"messages": _HELLO, "max_tokens": 9}),
    "responses": ("/v1/responses", {"input": "Hello", "store": False}),
    "tokenize": ("/tokenize", {"prompt": "Hello"}),
}


def _rows() -> list[tuple[str, str, dict[str, Any], str]]:
    """Return endpoint, field, example and result of every row and endpoint of the page."""
    found = []
    for line in _PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 5 and cells[1].startswith("`"):
            endpoints, field, example, result, _ = cells
            fields = json.loads(example.strip("`").replace("\\|", "|"))
            found += [(one, field.strip("`"), fields, result) for one in endpoints.split(", ")]
    return found


@pytest.mark.parametrize(("endpoint", "field", "fields", "result"), _rows())
def test_field_is_ignored_or_refused_as_the_page_says(
    gateway: RunningGateway, endpoint: str, field: str, fields: dict[str, Any], result: str
) -> None:
    """An ignored field is named in a header of the answer, a refused one in a 400."""
    gateway.scheduler.reply = reply_with([40, 2])
    path, base = _REQUESTS[endpoint]
    status, answer, headers = gateway.post(path, {"model": "tiny", **base, **fields})
    if result == "ignored":
        assert status == 200, answer
        assert field in headers["x-lockstep-ignored"].split(", ")
        page = gateway.get("/metrics")[1].decode()
        assert f'lockstep_gateway_ignored_fields_total{{field="{field}"}}' in page
    else:
        assert result == "refused"
        assert status == 400
        assert field in answer["error"]["message"]
        assert gateway.scheduler.submitted == []


def test_page_has_every_field_that_the_gateway_ignores_or_refuses() -> None:
    """No field is missing on the page."""
    known = {(endpoint, field, result) for endpoint, field, _, result in _rows()}
    ignored = {("chat", field, "ignored") for field in field_rules.CHAT_WITHOUT_EFFECT}
    ignored |= {("completions", field, "ignored") for field in field_rules.WITHOUT_EFFECT}
    ignored |= {("messages", field, "ignored") for field in messages_requests.WITHOUT_EFFECT}
    ignored |= {("responses", field, "ignored") for field in reading.WITHOUT_EFFECT}
    refused = {("chat", field, "refused") for field in field_rules.REFUSED_FIELDS}
    refused |= {("messages", field, "refused") for field in messages_requests.REFUSED_FIELDS}
    assert ignored | refused <= known


_OPENAI = ("chat", "completions", "responses")
_REFUSED = {
    **dict.fromkeys(_OPENAI, field_rules.REFUSED_FIELDS),
    "messages": messages_requests.REFUSED_FIELDS,
    "tokenize": tokens.REFUSED_FIELDS,
}


def _neutral_rows() -> set[tuple[str, str, str]]:
    """Return endpoint, field and value, as JSON, of the page's values that change nothing."""
    found = set()
    for line in _PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and cells[1].startswith("`"):
            endpoints, field, values = cells
            found |= {
                (endpoint, field.strip("`"), value)
                for endpoint in endpoints.split(", ")
                for value in re.findall("`(.*?)`", values)
            }
    return found


def test_page_has_every_value_that_changes_nothing() -> None:
    """The second table has the neutral values of all refused fields, and no others."""
    known = {
        (endpoint, field, json.dumps(value))
        for endpoint, fields in _REFUSED.items()
        for field, rule in fields.items()
        for value in rule.neutral
        if "." not in field or endpoint == "chat"
    }
    assert _neutral_rows() == known


@pytest.mark.parametrize("endpoint", _REFUSED)
def test_refused_fields_that_ask_for_nothing_are_passed_over(
    gateway: RunningGateway, endpoint: str
) -> None:
    """A client that sends every field that it knows is served, and nothing is reported."""
    names = [name for name in _REFUSED[endpoint] if "." not in name]
    unset: list[Any] = [None, "", []]
    variants: list[dict[str, Any]] = [dict.fromkeys(names, value) for value in unset]
    variants += [
        {field: json.loads(value)} for one, field, value in _neutral_rows() if one == endpoint
    ]
    path, base = _REQUESTS[endpoint]
    for variant in variants:
        body = {"model": "tiny", **base, **variant}
        if "messages.prefix" in variant:
            body = {"model": "tiny", "messages": [{**_HELLO[0], "prefix": False}]}
        status, answer, headers = gateway.post(path, body)
        assert status == 200, (variant, answer)
        assert "x-lockstep-ignored" not in headers


def test_request_without_ignored_fields_has_no_header(gateway: RunningGateway) -> None:
    """The header stands only where there is something to report."""
    assert "x-lockstep-ignored" not in gateway.post(*_with_model("chat"))[2]


def test_stream_names_ignored_fields_in_its_header(gateway: RunningGateway) -> None:
    """A stream has the header before its first event."""
    gateway.scheduler.reply = reply_with([40, 2])
    body = {"messages": _HELLO, "seed_of_life": 1}
    _, headers = gateway.stream_with_headers("/v1/chat/completions", body)
    assert headers["x-lockstep-ignored"] == "seed_of_life"


def test_names_of_ignored_fields_cannot_break_headers_or_metrics(gateway: RunningGateway) -> None:
    """Names with line ends, and thousands of names, stay one short header."""
    path, body = _with_model("chat")
    body |= {"a\r\nSet-Cookie: b": 1, "x" * 5_000: 1, "漢字": 1, 'q"uote,comma': 1}
    body |= {f"field{number}": 1 for number in range(2_000)}
    status, _, headers = gateway.post(path, body)
    assert status == 200
    assert "set-cookie" not in headers
    assert len(headers["x-lockstep-ignored"]) < 4_000
    assert headers["x-lockstep-ignored"].endswith(", ...")
    page = gateway.get("/metrics")[1].decode()
    assert page.count("lockstep_gateway_ignored_fields_total{") <= 201


def _with_model(endpoint: str) -> tuple[str, dict[str, Any]]:
    path, base = _REQUESTS[endpoint]
    return path, {"model": "tiny", **base}
