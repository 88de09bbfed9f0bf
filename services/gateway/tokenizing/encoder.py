"""Text to token ids; only the chat template can write special tokens, a client's text cannot.

Text without special tokens in it, that is nearly all text, is encoded exactly as the tokenizer
would. Else what the client wrote is marked before the template is rendered, so that afterwards the
template's special tokens can be told from the client's, which are encoded as plain characters.
"""

import bisect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from services.gateway.http.errors import invalid

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Noncharacters of Unicode: no text has them but on purpose, and no template changes them."""

SECTION_CHARS_MAX = 65_536
"""Text without a special token that is encoded once more to compare two conversations."""
WINDOW_CHARS = 64
"""Text encoded behind the place where two conversations part: what follows shapes tokens too."""


class Encoder:
    """The encoding side of a tokenizer."""

    def __init__(self, backend: Backend) -> None:
        state = backend.to_str()
        self._backend = Backend.from_str(state)
        self._plain = Backend.from_str(state)
        self._plain.encode_special_tokens = True
        for copy in (self._backend, self._plain):
            copy.no_truncation()
            copy.no_padding()
        special = [token for token in json.loads(state)["added_tokens"] if token["special"]]
        # A special token of one character cannot be broken by a mark; none is known.
        special = [token for token in special if len(token["content"]) > 1]
        self._ids = {token["content"]: int(token["id"]) for token in special}
        breakable = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, breakable)) or r"(?!)")
        self._is_normalized = any(token["normalized"] for token in special)

    def encode_raw(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a raw prompt; special tokens in it count: it may be in the model's chat format."""
        return _ids(self._backend, text, add_special_tokens=add_special_tokens)

    def encode_conversation(self, fields: Any, render: Callable[[Any], str]) -> "Conversation":
        """Encode a conversation.

        Args:
            fields: everything that comes from the client, nested lists and dicts of strings.
            render: makes the text of it, with the template's special tokens.
        """
        mark = _unused_mark(fields) if self._has_special(fields) else ""
        text = render(self.marked(fields, mark))
        if not mark:
            ids = _ids(self._backend, text)
            if not (self._is_normalized and self._counts_differ(text, ids)):
                return Conversation(self, text, ids, mark, in_pieces=False)
            # Normalizing made a special token of what was none, for example of full-width letters.
        return Conversation(self, text, self._encode_pieces(text, mark), mark, in_pieces=True)

    def encode_rendered(self, text: str, mark: str, *, in_pieces: bool) -> list[int]:
        """Encode part of a rendered conversation as `encode_conversation` has encoded the whole."""
        return self._encode_pieces(text, mark) if in_pieces else _ids(self._backend, text)

    def special_places(self, text: str, ids: list[int]) -> list[tuple[int, int, int]]:
        """Return (first character, end, place among `ids`) of each special token of a text.

        Empty when text and ids do not tell the same.
        """
        found = list(self._special.finditer(text))
        known = set(self._ids.values())
        places = [place for place, token in enumerate(ids) if token in known]
        if [self._ids[one[0]] for one in found] != [ids[place] for place in places]:
            return []
        return [(one.start(), one.end(), place) for one, place in zip(found, places, strict=True)]

    def _has_special(self, value: Any) -> bool:
        return any(self._special.search(text) for text in _strings(value))

    def marked(self, value: Any, mark: str) -> Any:
        """Return a copy with a mark, if there is one, in every special token."""
        return self._marked(value, mark) if mark else value

    def _marked(self, value: Any, mark: str) -> Any:
        """Put the mark behind the first character of every special token."""
        if isinstance(value, str):
            while self._special.search(value):
                value = self._special.sub(lambda found: found[0][0] + mark + found[0][1:], value)
            return value
        if isinstance(value, list):
            return [self._marked(item, mark) for item in value]
        if isinstance(value, dict):
            return {
                self._marked(key, mark): self._marked(item, mark) for key, item in value.items()
            }
        return value

    def _encode_pieces(self, text: str, mark: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for found in self._special.finditer(text):
            ids += self._encode_plain(text[start : found.start()], mark)
            ids.append(self._ids[found[0]])
            start = found.end()
        return ids + self._encode_plain(text[start:], mark)

    def _encode_plain(self, text: str, mark: str) -> list[int]:
        if mark:
            text = text.replace(mark, "")
        return _ids(self._plain, text) if text else []

    def _counts_differ(self, text: str, ids: list[int]) -> bool:
        special = set(self._ids.values())
        return sum(token in special for token in ids) != sum(
            1 for _ in self._special.finditer(text)
        )


class Conversation:
    """A conversation as the template wrote it, encoded."""

    def __init__(
        self, encoder: Encoder, text: str, ids: list[int], mark: str, *, in_pieces: bool
    ) -> None:
        self.ids = ids
        self._encoder = encoder
        self._text = text
        self._mark = mark
        self._in_pieces = in_pieces
        self._special: list[tuple[int, int, int]] | None = None

    def shared_tokens(self, fields: Any, render: Callable[[Any], str]) -> int:
        """Return how many first tokens another conversation would have in common with this one.

        Never more than that. Only what stands behind the last special token that both hold is
        encoded for it; where that is too much, its tokens do not count.

        Args:
            fields: what comes from the client in the other conversation.
            render: makes its text.
        """
        other = render(self._encoder.marked(fields, self._mark))
        end = _shared(self._text, other)
        start, count = self._special_before(end)
        if end - start > SECTION_CHARS_MAX:
            return count
        section = self._encoder.encode_rendered(
            other[start : end + WINDOW_CHARS], self._mark, in_pieces=self._in_pieces
        )
        return count + _shared(section, self.ids[count : count + len(section)])

    def _special_before(self, end: int) -> tuple[int, int]:
        """Return where the last special token that ends by `end` begins: character, token.

        Text is cut at special tokens before it is encoded, so from there on tokens do not depend
        on what stands before.
        """
        if self._special is None:
            self._special = self._encoder.special_places(self._text, self.ids)
        number = bisect.bisect_right(self._special, end, key=lambda place: place[1])
        if number == 0:
            return 0, 0
        start, _, count = self._special[number - 1]
        return start, count


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the longest common prefix; compares slices, which is fast."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _ids(backend: Backend, text: str, *, add_special_tokens: bool = False) -> list[int]:
    # Of the library's ways only those with a batch let other threads run meanwhile; measured with
    # 600,000 characters: `encode` held the event loop up for 230 ms, this for 4.
    encoding = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    ids: list[int] = encoding.ids
    return ids


def _strings(value: Any) -> list[str]:
    """Return all strings in nested lists and dicts, keys too."""
    found: list[str] = []
    level = [value]
    while level:
        item = level.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, list):
            level += item
        elif isinstance(item, dict):
            level += item.keys()
            level += item.values()
    return found


def _unused_mark(fields: Any) -> str:
    strings = _strings(fields)
    for mark in _MARKS:
        if not any(mark in text for text in strings):
            return mark
    raise invalid("The messages use all of the noncharacters U+FDD0 to U+FDEF.", "messages")
