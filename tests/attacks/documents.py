"""Attacks on memory and disk with stored responses."""

from typing import Any

from tests.attacks.attack import LONG_ANSWER, NO_END, Attack, ask, keep_open
from tests.attacks.attacker import MODEL, QUESTION, Attacker, get, post

PATH = "/v1/responses"
REQUEST_MORE_S = 2.0
"""Most by which documents of others may lengthen a request with a stored response."""
_LARGE_BYTES = 15 * 1024 * 1024


def kept_bodies(attacker: Attacker) -> None:
    """Keep 40 long answers open whose requests have an ignored item of 15 MB."""
    body = _body(_padding(), stream=True, max_output_tokens=LONG_ANSWER, logit_bias=NO_END)
    keep_open(attacker, [post(body, PATH)] * 40)


def response_chains(attacker: Attacker) -> None:
    """Add thousands of parts to a stored response, each time to the one before."""
    item = {"type": "x", "a": [{}] * 12_000}
    while not attacker.is_over:
        previous: str | None = None
        for _ in range(8):
            answer = ask(attacker, _body(item, previous_response_id=previous), PATH)
            previous = answer.get("id")
            if previous is None:
                break


def stored_reads(attacker: Attacker) -> None:
    """Read a stored response of 15 MB nine times at once, again and again."""
    stored = ask(attacker, _body(_padding()), PATH).get("id")
    requests = [get(f"{PATH}/{stored}/input_items")] * 9
    while not attacker.is_over:
        attacker.exchange_all(requests)


def document_flood(attacker: Attacker) -> None:
    """Store responses of 15 MB as fast as possible, many more than the disk may have."""
    requests = [post(_body(_padding()), PATH)] * 4
    while not attacker.is_over:
        attacker.exchange_all(requests)


def _padding() -> dict[str, Any]:
    """Return an item of an unknown kind: it is stored, but no part of the prompt."""
    return {"type": "x", "a": "x" * _LARGE_BYTES}


def _body(item: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the body of a request for a response that is stored."""
    items = [QUESTION, item]
    return {"model": MODEL, "input": items, "max_output_tokens": 1, "store": True, **fields}


ATTACKS = [
    Attack("kept-bodies", kept_bodies, must_depart=True, status=200),
    Attack("response-chains", response_chains, status=400),
    Attack("stored-reads", stored_reads, status=200, request_more_s=REQUEST_MORE_S),
    Attack("document-flood", document_flood, status=200, request_more_s=REQUEST_MORE_S),
]
