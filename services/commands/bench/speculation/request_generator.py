"""Requests whose answers have a known kind: a copy of the prompt, repetitive text, or neither.

Only a model that follows instructions writes such texts. The built-in demo model gets requests that
it was trained on; other models get general requests.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from services.commands.bench.load.load_processes import CHAT, COMPLETIONS

COPY, CODE, PROSE = "copy", "code", "prose"
KINDS = (COPY, CODE, PROSE)
"""The answer repeats a text of the prompt; it repeats one pattern; it does neither."""

_COPY_CHARS = 480
"""Characters to copy; the demo model repeats up to 560 characters without a mistake."""
_LIST_LINES = (22, 30)
_JSON_WORDS = (14, 20)

_NOUNS = (
    "apple", "river", "stone", "garden", "window", "table", "bottle", "paper", "pencil",
    "letter", "market", "village", "forest", "valley", "island", "harbor", "bridge", "castle",
    "tower", "temple", "street", "corner", "kitchen", "carpet", "mirror", "candle", "basket",
    "blanket", "pillow", "hammer", "ladder", "bucket", "engine", "wheel", "rocket", "planet",
    "signal", "cable", "switch", "router", "packet", "buffer", "thread", "kernel", "module",
    "parser", "vector", "matrix", "circle", "square",
)  # fmt: skip
_VERBS = (
    "opens", "closes", "finds", "carries", "watches", "follows", "builds", "breaks", "paints",
    "cleans", "moves", "holds", "drops", "lifts", "pushes", "pulls", "reads", "writes", "sends",
    "brings", "takes", "keeps", "hides", "shows",
)  # fmt: skip
_ADJECTIVES = (
    "red", "blue", "green", "yellow", "white", "black", "brown", "small", "large", "tiny",
    "huge", "old", "new", "young", "quiet", "loud", "quick", "slow", "warm", "cold", "bright",
    "dark", "soft", "heavy",
)  # fmt: skip
_BEGINNINGS = (
    "The scheduler", "A step plan", "The gateway", "The cache store", "An epoch", "A rank worker",
    "A receipt", "A digest", "A slot", "To drain means", "To preempt", "MLX is", "The ring backend",
    "Prefill is", "Decode is", "A request",
)  # fmt: skip


class RequestGenerator:
    """Generates requests of one kind; the same seed gives the same requests.

    Args:
        kind: kind of the answers, one of KINDS.
        seed: requests with different seeds differ.
        is_demo: make requests that the built-in demo model was trained on.
    """

    def __init__(self, kind: str, seed: int, *, is_demo: bool) -> None:
        self._random = Random(f"{kind} {seed}")
        self._count = 0
        self._make = (_DEMO if is_demo else _GENERAL)[kind]
        self.path = COMPLETIONS if is_demo and kind == PROSE else CHAT
        """Path of the endpoint for these requests."""

    def next(self) -> dict[str, Any]:
        """Return the fields of the next request's body that hold its prompt or its messages."""
        self._count += 1
        return self._make(self._random, self._count)


def _copy(random: Random, _: int) -> dict[str, Any]:
    text = _sentence(random)
    while len(text) < _COPY_CHARS:
        text += " " + _sentence(random)
    return _chat_fields(f"Repeat this text exactly:\n{text}")


def _lists(random: Random, number: int) -> dict[str, Any]:
    """Ask for a numbered list and a JSON list alternately; the demo model writes no code."""
    if number % 2:
        word, lines = random.choice(_NOUNS), random.randint(*_LIST_LINES)
        return _chat_fields(f'Write a numbered list with the word "{word}" {lines} times.')
    *words, last = random.sample(_NOUNS, random.randint(*_JSON_WORDS))
    return _chat_fields(f"Write a JSON list of the words {', '.join(words)} and {last}")


def _story(random: Random, _: int) -> dict[str, Any]:
    """Begin a sentence; the demo model continues with further sentences."""
    return {"prompt": random.choice(_BEGINNINGS)}


def _edit(random: Random, _: int) -> dict[str, Any]:
    old, new, *names = random.sample(_NOUNS, 12)
    lines = []
    for name in names:
        lines.append(f"def {random.choice(_VERBS)}_{name}({old}: int) -> int:")
        lines.append(f"    {name} = {old} * {random.randrange(2, 999)}")
        lines.append(f"    return {name} - {random.randrange(2, 999)}\n")
    code = "\n".join(lines)
    return _chat_fields(
        f"Rename {old} to {new} in this code. Answer with the whole code and nothing else.\n"
        f"```python\n{code}```"
    )


def _class(random: Random, _: int) -> dict[str, Any]:
    owner, *names = random.sample(_NOUNS, 9)
    return _chat_fields(
        f"Write a Python class {owner.title()} with a property and a setter that checks for a "
        f"negative number, for each of these attributes: {', '.join(names)}. Answer with code only."
    )


def _tale(random: Random, _: int) -> dict[str, Any]:
    one, other = random.sample(_NOUNS, 2)
    adjective = random.choice(_ADJECTIVES)
    return _chat_fields(f"Write a story about a {adjective} {one} and a {other}. Repeat no phrase.")


def _sentence(random: Random) -> str:
    one, other, third = random.sample(_NOUNS, 3)
    first, second = random.sample(_ADJECTIVES, 2)
    return f"The {first} {one} {random.choice(_VERBS)} the {other} near the {second} {third}."


def _chat_fields(text: str) -> dict[str, Any]:
    # A model that writes its reasoning would write another kind of text.
    return {
        "messages": [{"role": "user", "content": text}],
        "chat_template_kwargs": {"enable_thinking": False},
    }


_Maker = Callable[[Random, int], dict[str, Any]]
_DEMO: dict[str, _Maker] = {COPY: _copy, CODE: _lists, PROSE: _story}
_GENERAL: dict[str, _Maker] = {COPY: _edit, CODE: _class, PROSE: _tale}
