"""Text to token ids; only the chat template can write special tokens, a client's text cannot.

Text without special tokens in it, that is nearly all text, is encoded exactly as the tokenizer
would. Else what the client wrote is marked before the template is rendered, so that afterwards the
template's special tokens can be told from the client's, which are encoded as plain characters.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer as Backend

from services.gateway.openai_errors import invalid

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Noncharacters of Unicode: no text has them but on purpose, and no template changes them."""


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
        self._ids = {token["content"]: int(token["id"]) for token in special}
        # A special token of one character cannot be broken by a mark; none is known.
        breakable = sorted((text for text in self._ids if len(text) > 1), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, breakable)) or r"(?!)")
        self._is_normalized = any(token["normalized"] for token in special)

    def encode_raw(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a raw prompt; special tokens in it count: it may be in the model's chat format."""
        return _ids(self._backend, text, add_special_tokens=add_special_tokens)

    def encode_conversation(self, fields: Any, render: Callable[[Any], str]) -> list[int]:
        """Encode a conversation.

        Args:
            fields: everything that comes from the client, nested lists and dicts of strings.
            render: makes the text of it, with the template's special tokens.
        """
        mark = ""
        if self._has_special(fields):
            mark = _unused_mark(fields)
            fields = self._marked(fields, mark)
        text = render(fields)
        if mark:
            return self._encode_pieces(text, mark)
        ids = _ids(self._backend, text)
        if self._is_normalized and self._counts_differ(text, ids):
            # Normalizing made a special token of what was none, for example of full-width letters.
            return self._encode_pieces(text, mark)
        return ids

    def _has_special(self, value: Any) -> bool:
        return any(self._special.search(text) for text in _strings(value))

    def _marked(self, value: Any, mark: str) -> Any:
        """Return a copy with a mark behind the first character of every special token."""
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
