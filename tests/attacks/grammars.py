"""Attacks with grammars that nest deeply, take long to compile, or never end."""

import contextlib
import json
import time
from typing import Any

from tests.attacks.attack import Attack, new_number, repeat_new
from tests.attacks.attacker import Attacker, completion, post
from tests.attacks.target import ACCOMPLICE_KEY, ATTACKER_KEY

REQUEST_MORE_S = 1.0
"""Most by which slow grammars of others may lengthen a request with or without a grammar."""


def rule_chain(attacker: Attacker) -> None:
    """Send grammars of thousands of rules, each of which names the next."""

    def make(number: int) -> list[bytes]:
        count = (2_500, 4_000, 12_000)[number % 3]
        rules = "".join(f"a{n}: a{n + 1}\n" for n in range(count))
        grammar = f'start: a0\n{rules}a{count}: "{number}"\n'
        return [post(completion(guided_grammar=grammar, max_tokens=4))]

    repeat_new(attacker, make)


def ref_chain(attacker: Attacker) -> None:
    """Send schemas of hundreds and thousands of definitions, each of which names the next."""

    def make(number: int) -> list[bytes]:
        count = (500, 1_500, 4_000)[number % 3]
        parts: dict[str, Any] = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(count)}
        parts[f"a{count}"] = {"const": number}
        return [post(_with_schema({"$ref": "#/$defs/a0", "$defs": parts}))]

    repeat_new(attacker, make)


def pattern_joins(attacker: Attacker) -> None:
    """Send schemas of 40 patterns that one text must match together."""

    def make(number: int) -> list[bytes]:
        patterns = [{"type": "string", "pattern": f"a{number}b{n}"} for n in range(40)]
        return [post(_with_schema({"allOf": patterns}))]

    repeat_new(attacker, make)


def huge_divisors(attacker: Attacker) -> None:
    """Send schemas and rules for multiples of a large number, which compile for minutes."""

    def make(number: int) -> list[bytes]:
        schema = {"type": "integer", "multipleOf": 8_000_009 + 2 * number}
        grammar = f"start: %json {json.dumps(schema)}"
        return [post(_with_schema(schema)), post(completion(guided_grammar=grammar, max_tokens=4))]

    repeat_new(attacker, make)


def slow_schemas(attacker: Attacker) -> None:
    """Send four schemas that take long to compile with each of two keys at the same time."""
    repeat_new(
        attacker,
        lambda number: [
            post(_with_schema(_slow_schema(number, part)), key=key)
            for part in range(4)
            for key in (ATTACKER_KEY, ACCOMPLICE_KEY)
        ],
    )


def grammar_aborts(attacker: Attacker) -> None:
    """Send sixteen schemas that take long to compile, leave in the middle, and begin again."""
    while not attacker.is_over:
        number = new_number()
        with contextlib.ExitStack() as connections, contextlib.suppress(OSError):
            for part in range(16):
                request = post(_with_schema(_slow_schema(number, part)))
                connections.enter_context(attacker.connected()).sendall(request)
            # The gateway compiles them first, and ranks those that it has accepted.
            time.sleep(min((0.5, 2.5)[number % 2], attacker.left_s))


def _with_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return completion(guided_json=schema, max_tokens=4)


def _slow_schema(number: int, part: int) -> dict[str, Any]:
    """Return a schema that takes about 0.1 s to compile: it has many optional fields.

    Those of different numbers or parts are different.
    """
    names = [f"p{number}_{part}_{n}" for n in range(800)]
    fields = {name: {"type": "string"} for name in names}
    return {"type": "object", "properties": fields, "required": names[:1]}


ATTACKS = [
    Attack("rule-chain", rule_chain, status=200),
    Attack("ref-chain", ref_chain, status=200),
    Attack("pattern-joins", pattern_joins, status=400, request_more_s=REQUEST_MORE_S),
    Attack("huge-divisors", huge_divisors, status=400, request_more_s=REQUEST_MORE_S),
    Attack("slow-schemas", slow_schemas, status=200, request_more_s=REQUEST_MORE_S),
    Attack("grammar-aborts", grammar_aborts, must_depart=True, request_more_s=REQUEST_MORE_S),
]
