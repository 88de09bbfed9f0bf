"""Skill of writing small JSON values on request."""

from __future__ import annotations

from typing import Any

from tools.demo_model.conversations.chat import Chat, as_json, turn
from tools.demo_model.conversations.words import TextSource

KEYS = """name age city country color size price count id title email street phone score level
weight height length width speed state status kind type mode owner author year month day hour
active open ready enabled visible code user host port path file error message total limit
first_name last_name user_id is_active created_at""".split()

HEADS = (
    "Write a JSON object with ",
    "Write a JSON object with ",
    "Write JSON with ",
    "Give me a JSON object with ",
    "Make a JSON object with ",
    "Create a JSON object with ",
    "Return a JSON object with ",
    "Please write a JSON object with ",
    "Answer in JSON with ",
    "Write a JSON object where ",
    "Write this as JSON: ",
    "Return JSON: ",
)
JOINTS = (" ", " ", " ", " is ", " = ", ": ", " set to ")


def random_key(source: TextSource) -> str:
    """Return a random key of a JSON object: a common one, any noun, or two nouns."""
    form = source.integer(0, 9)
    if form < 6:
        return source.rng.choice(KEYS)
    return source.noun() if form < 9 else f"{source.noun()}_{source.noun()}"


def _plain_value(source: TextSource, depth: int) -> Any:
    form = source.integer(0, 15)
    if form < 4:
        return source.integer(0, 120)
    if form < 6:
        return int(source.digits(1, 6))
    if form == 6:
        return -source.integer(1, 99)
    if form == 7:
        return source.integer(0, 99) + source.integer(1, 9) / 10
    if form == 8:
        return source.chance(0.5)
    if form == 9:
        return None if source.chance(0.4) else source.chance(0.5)
    if form == 10 and depth == 0:
        return [_plain_value(source, 1) for _ in range(source.integer(1, 4))]
    return _word_value(source)


def _word_value(source: TextSource) -> str:
    form = source.integer(0, 6)
    if form == 0:
        return source.city()
    if form == 1:
        return f"{source.noun()} {source.noun()}"
    if form == 2:
        return source.letters()
    return source.name() if form == 3 else source.noun()


def _value_in_request(value: Any, bare: bool) -> str:
    """Return the value as the request writes it: JSON, or a string without its quotes."""
    if bare and isinstance(value, str) and " " not in value and not value.isdigit():
        return value
    return as_json(value)


def random_object(source: TextSource, most: int = 5) -> dict[str, Any]:
    """Return a random JSON object of one to `most` pairs."""
    count = source.integer(1, most)
    return {random_key(source): _plain_value(source, 0) for _ in range(count)}


def object_chat(source: TextSource) -> Chat:
    """Return a request that names the pairs of a random JSON object, and the object as answer."""
    return object_request(
        source,
        random_object(source),
        head=source.rng.choice(HEADS),
        joint=source.rng.choice(JOINTS),
        bare=source.chance(0.3),
    )


def object_request(
    source: TextSource,
    value: dict[str, Any],
    head: str = HEADS[0],
    joint: str = " ",
    bare: bool = False,
) -> Chat:
    """Return a request that names the pairs of this JSON object, and the object as answer.

    Args:
        source: random choice of commas and quotes.
        value: the object.
        head: words before the pairs.
        joint: text between a key and its value.
        bare: whether the request writes strings without quotes.
    """
    pairs = []
    for key, item in value.items():
        shown = f'"{key}"' if not bare and source.chance(0.1) else key
        pairs.append(shown + joint + _value_in_request(item, bare))
    last = source.rng.choice((" and ", " and ", ", ", ", and "))
    text = pairs[0] if len(pairs) == 1 else ", ".join(pairs[:-1]) + last + pairs[-1]
    end = source.rng.choice(("", "", ".")) if not bare else ""
    return Chat(turn(head + text + end, as_json(value)), task="json")


def list_chat(source: TextSource) -> Chat:
    """Return a request for a JSON list of given words or numbers, or for its words as text."""
    if source.chance(0.3):
        return _list_as_text(source)
    if source.chance(0.6):
        most = 20 if source.chance(0.5) else 6
        items: list[Any] = [_word_value(source) for _ in range(source.integer(1, most))]
        what = source.rng.choice(("words", "strings", "items"))
    else:
        items = [source.integer(0, 999) for _ in range(source.integer(1, 6))]
        what = "numbers"
    shown = [str(item) for item in items]
    text = shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " and " + shown[-1]
    head = source.rng.choice(("Write a JSON list of the {} ", "Write a JSON array with the {} "))
    return Chat(turn(head.format(what) + text, as_json(items)), task="json")


def _list_as_text(source: TextSource) -> Chat:
    """Return the reverse request: the words of a JSON list without quotes."""
    items = [_word_value(source) for _ in range(source.integer(1, 12))]
    question = "Write this list as plain text: " + as_json(items)
    return Chat(turn(question, ", ".join(items)), task="json")


def json_chat(source: TextSource) -> Chat:
    """Return a request for a JSON object or, in 3 of 10 cases, for a list."""
    return list_chat(source) if source.chance(0.3) else object_chat(source)
