"""Places in a rendered conversation where a turn's own tokens take the place of its text.

The template's text and the text that the model wrote may differ in white space, and in spellings
that mean the same in the format of the model's calls; in nothing else.
A turn begins where the prompt ended that it answered, and ends at a special token. So the tokens
around it are those that the template's text gives there.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from re import Match

from services.gateway.tokenizing.replay.turns import DecodeTokens, PromptPlace, Turn

FindSpecial = Callable[[str, int], Iterator[Match[str]]]
"""Yields the special tokens in a text from a position on, in order."""


@dataclasses.dataclass(frozen=True, slots=True)
class Splice:
    """A part of a text whose tokens are known."""

    start: int
    end: int
    """Characters from `start` to before `end` are replaced."""
    ids: Sequence[int]
    """Their token ids."""
    stop: str
    """The special token that is the last of them; "" if it is not."""


def find_place(text: str) -> PromptPlace:
    """Return the place at the end of a prompt's text."""
    return PromptPlace(len(text), _hasher(text).digest())


def find_splices(
    text: str,
    mark: str,
    turns: Sequence[Turn],
    stop_names: frozenset[str],
    find_special: FindSpecial,
    decode: DecodeTokens,
    simplify: Callable[[str], str] = str,
) -> list[Splice]:
    """Return the parts of a rendered conversation that are turns which the model wrote.

    Args:
        text: the rendered conversation.
        mark: the character inserted into special tokens of client text; "" for none.
        turns: the turns of the conversation, in order.
        stop_names: the special tokens that end turns.
        find_special: finds special tokens.
        decode: decodes token ids of turns.
        simplify: returns a turn's text without differences that mean nothing.
    """
    found: list[Splice] = []
    digest = _hasher("")
    hashed = free = 0
    for turn in sorted(turns, key=lambda turn: turn.place.chars):
        start = turn.place.chars
        if not free <= start <= len(text):
            continue
        digest.update(_encoded(text[hashed:start]))
        hashed = start
        if digest.digest() != turn.place.digest:
            continue
        end = next((one for one in find_special(text, start) if one[0] in stop_names), None)
        if end is None or turn.stop not in ("", end[0]):
            continue
        rendered = text[start : end.start()]
        rendered = rendered.replace(mark, "") if mark else rendered
        own = turn.written(decode)
        if _squeezed(simplify(rendered)) != _squeezed(simplify(own)):
            continue
        free = end.end() if turn.stop else end.start()
        found.append(Splice(start, free, turn.ids, turn.stop))
    return found


def _hasher(text: str) -> "hashlib.blake2b":
    return hashlib.blake2b(_encoded(text), digest_size=16)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _squeezed(text: str) -> str:
    """Return the text without white space."""
    return "".join(text.split())
