"""Encoding of text to token ids. Only the chat template can write special tokens, clients cannot.

Client text without special tokens is encoded exactly as the tokenizer does it. Otherwise a mark (a
Unicode noncharacter) is inserted into each special token in client text before the template is
rendered. It keeps them apart from the template's own special tokens, and is removed when they are
encoded as plain characters.
"""

import bisect
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from services.gateway.http.errors import invalid
from services.gateway.tokenizing.replay.splicing import Splice, find_splices
from services.gateway.tokenizing.replay.turns import Turn

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Noncharacters of Unicode: normal text does not have them, and templates do not change them."""

SEARCH_CHARS = 4_096
"""Characters searched for special tokens at once. Measured with 100 special tokens and the text
that takes longest: 1.3 ms."""
SECTION_CHARS_MAX = 65_536
"""Longest text between special tokens that is encoded again to compare two conversations."""
WINDOW_CHARS = 64
"""Text encoded after the position where two conversations diverge, because it affects tokens."""


class Encoder:
    """Encoder of raw prompts and of conversations to token ids, for one tokenizer."""

    def __init__(self, backend: Backend) -> None:
        state = backend.to_str()
        self._backend = Backend.from_str(state)
        self._plain = Backend.from_str(state)
        self._plain.encode_special_tokens = True
        for copy in (self._backend, self._plain):
            copy.no_truncation()
            copy.no_padding()
        special = [token for token in json.loads(state)["added_tokens"] if token["special"]]
        # A mark cannot split a special token of one character; no known tokenizer has one.
        special = [token for token in special if len(token["content"]) > 1]
        self._ids = {token["content"]: int(token["id"]) for token in special}
        self._special_ids = frozenset(self._ids.values())
        self._special_chars_max = max(map(len, self._ids), default=1)
        breakable = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, breakable)) or r"(?!)")
        self._is_normalized = any(token["normalized"] for token in special)

    def encode_raw(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a raw prompt.

        Special tokens written in the prompt stay special tokens, so it may use the chat format.

        Args:
            text: the prompt.
            add_special_tokens: add the tokens that the tokenizer puts around a text, such as the
                beginning of a sequence.
        """
        return _ids(self._backend, text, add_special_tokens=add_special_tokens)

    def decode_whole(self, tokens: list[int]) -> str:
        """Return the text of token ids with special tokens written out."""
        # Only the library's batch methods release the interpreter lock. Measured with 300,000 ids:
        # `decode` blocked other threads for 127 ms, this for 6 ms.
        text: str = self._backend.decode_batch([tokens], skip_special_tokens=False)[0]
        return text

    def encode_conversation(
        self,
        fields: Any,
        render: Callable[[Any], str],
        turns: Sequence[Turn] = (),
        stop_names: frozenset[str] = frozenset(),
        simplify: Callable[[str], str] = str,
    ) -> "EncodedConversation":
        """Render a conversation and encode it; special tokens in client text become plain text.

        Args:
            fields: all client data, as nested lists and dicts of strings.
            render: returns the text of the fields, with the chat template's special tokens.
            turns: turns of the conversation that the model wrote. Where the rendered text is one of
                them, its own tokens are used.
            stop_names: the special tokens that end turns.
            simplify: returns a turn's text without differences that mean nothing.

        Raises:
            ApiError: 400 when the client data contain every noncharacter from U+FDD0 to U+FDEF, so
                that none can mark special tokens, or when `render` raises it.
        """
        has_special = any(self._has_special(text) for text in _strings(fields))
        mark = _unused_mark(fields) if has_special else ""
        text = render(self.mark_special(fields, mark))
        stops = stop_names & self._ids.keys()
        splices = find_splices(
            text, mark, turns, stops, self._find_special, self.decode_whole, simplify
        )
        if splices:
            return self._encode_spliced(text, mark, splices)
        if not mark:
            ids = _ids(self._backend, text)
            if not (self._is_normalized and self._counts_differ(text, ids)):
                return EncodedConversation(self, text, ids, mark, in_pieces=False)
            # Normalizing created a special token, for example from full-width letters.
        return EncodedConversation(
            self, text, self._encode_pieces(text, mark), mark, in_pieces=True
        )

    def _encode_spliced(self, text: str, mark: str, splices: list[Splice]) -> "EncodedConversation":
        """Encode a rendered text of which some parts have known tokens."""
        in_pieces = bool(mark)
        while True:
            ids: list[int] = []
            special: list[tuple[int, int, int]] = []
            start, stop = 0, ""
            for splice in [*splices, None]:
                # With the special token before it, text is encoded as inside the conversation.
                part = stop + text[start : len(text) if splice is None else splice.start]
                part_ids = self.encode_rendered(part, mark, in_pieces=in_pieces)
                if self._is_normalized and not in_pieces and self._counts_differ(part, part_ids):
                    break
                first, index = start - len(stop), len(ids) - bool(stop)
                special += [
                    (first + begin, first + end, index + number)
                    for begin, end, number in self.find_special_tokens(part, part_ids)
                ]
                ids += part_ids[bool(stop) :]
                if splice is None:
                    return EncodedConversation(
                        self, text, ids, mark, in_pieces=in_pieces, known_special_tokens=special
                    )
                ids += splice.ids
                start, stop = splice.end, splice.stop
            in_pieces = True

    def encode_rendered(self, text: str, mark: str, *, in_pieces: bool) -> list[int]:
        """Return the token ids of a part of a rendered conversation, encoded like the whole.

        Args:
            text: the part, which begins at a special token or at the start.
            mark: the character inserted into special tokens of client text; "" for none.
            in_pieces: the text between special tokens was encoded separately from them.
        """
        return self._encode_pieces(text, mark) if in_pieces else _ids(self._backend, text)

    def find_special_tokens(self, text: str, ids: list[int]) -> list[tuple[int, int, int]]:
        """Return the place of each special token of an encoded text, in order.

        Args:
            text: the text.
            ids: its token ids.

        Returns:
            (first character, character after the last, position in `ids`) of each special token; []
            when `text` and `ids` do not have the same special tokens.
        """
        found = list(self._find_special(text))
        indexes = [index for index, token in enumerate(ids) if token in self._special_ids]
        if [self._ids[match[0]] for match in found] != [ids[index] for index in indexes]:
            return []
        return [
            (match.start(), match.end(), index) for match, index in zip(found, indexes, strict=True)
        ]

    def mark_special(self, value: Any, mark: str) -> Any:
        """Return a copy of client data in which no text contains a special token.

        The mark is inserted after the first character of every special token. So the rendered text
        contains only the special tokens that the chat template wrote.

        Args:
            value: client data: a string, a list or a dict (also its keys), nested in any way;
                values of other types stay.
            mark: a character that `value` does not contain; "" returns `value` itself.
        """
        if not mark:
            return value
        if isinstance(value, str):
            while self._has_special(value):
                value = self._insert_mark(value, mark)
            return value
        if isinstance(value, list):
            return [self.mark_special(item, mark) for item in value]
        if isinstance(value, dict):
            return {
                self.mark_special(key, mark): self.mark_special(item, mark)
                for key, item in value.items()
            }
        return value

    def has_special_token(self, value: Any) -> bool:
        """Return whether client data contain the text of a special token.

        Args:
            value: a string, a list or a dict, nested in any way.
        """
        return any(self._has_special(text) for text in _strings(value))

    def _has_special(self, text: str) -> bool:
        return next(self._find_special(text), None) is not None

    def _find_special(self, text: str, start: int = 0) -> Iterator[re.Match[str]]:
        """Yield the special tokens in a text in order, searching a piece at a time.

        One search of all text would hold the interpreter lock to its end.

        Args:
            text: the text.
            start: the first character that is searched.
        """
        while start < len(text):
            end = start + SEARCH_CHARS
            found = self._special.search(text, start, end + self._special_chars_max)
            if found is None or found.start() >= end:
                start = end
            else:
                yield found
                start = found.end()

    def _insert_mark(self, text: str, mark: str) -> str:
        pieces: list[str] = []
        start = 0
        for found in self._find_special(text):
            pieces += [text[start : found.start() + 1], mark]
            start = found.start() + 1
        return "".join([*pieces, text[start:]])

    def _encode_pieces(self, text: str, mark: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for found in self._find_special(text):
            ids += self._encode_plain(text[start : found.start()], mark)
            ids.append(self._ids[found[0]])
            start = found.end()
        return ids + self._encode_plain(text[start:], mark)

    def _encode_plain(self, text: str, mark: str) -> list[int]:
        if mark:
            text = text.replace(mark, "")
        return _ids(self._plain, text) if text else []

    def _counts_differ(self, text: str, ids: list[int]) -> bool:
        special_ids = sum(token in self._special_ids for token in ids)
        return special_ids != sum(1 for _ in self._find_special(text))


@dataclasses.dataclass
class EncodedConversation:
    """A rendered conversation with its token ids; counts first tokens that another one shares."""

    encoder: Encoder
    """The encoder that made it."""
    text: str
    """The rendered text, with marks."""
    ids: list[int]
    """Token ids of the text."""
    mark: str
    """The character inserted into special tokens of client text; "" for none."""
    in_pieces: bool
    """The text between special tokens was encoded separately from them."""
    known_special_tokens: list[tuple[int, int, int]] | None = None
    """First character, character after the last, and index in `ids` of each special token that
    another conversation may share; None: they are searched for when they are needed."""

    def count_shared_tokens(self, fields: Any, render: Callable[[Any], str]) -> int:
        """Return how many first tokens another conversation has in common with this one.

        The result may be too small, never too large. Only the text after the last common special
        token is encoded; if it has more than `SECTION_CHARS_MAX` characters, its tokens are not
        counted.

        Args:
            fields: the client data of the other conversation.
            render: returns the text of `fields`.

        Raises:
            ApiError: 400 when `render` raises it.
        """
        other = render(self.encoder.mark_special(fields, self.mark))
        end = _common_prefix(self.text, other)
        start, count = self._special_before(end)
        if end - start > SECTION_CHARS_MAX:
            return count
        section = self.encoder.encode_rendered(
            other[start : end + WINDOW_CHARS], self.mark, in_pieces=self.in_pieces
        )
        return count + _common_prefix(section, self.ids[count : count + len(section)])

    def _special_before(self, end: int) -> tuple[int, int]:
        """Return character and token index of the last special token before character `end`.

        Text is split at special tokens before it is encoded, so tokens from there on do not depend
        on earlier text.
        """
        number = bisect.bisect_right(self._special_tokens, end, key=lambda token: token[1])
        if number == 0:
            return 0, 0
        start, _, count = self._special_tokens[number - 1]
        return start, count

    @functools.cached_property
    def _special_tokens(self) -> list[tuple[int, int, int]]:
        if self.known_special_tokens is not None:
            return self.known_special_tokens
        return self.encoder.find_special_tokens(self.text, self.ids)


def _common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the longest common prefix by binary search over slices."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _ids(backend: Backend, text: str, *, add_special_tokens: bool = False) -> list[int]:
    # Only the library's batch methods release the interpreter lock. Measured with 600,000
    # characters: `encode` blocked the event loop for 230 ms, this for 4 ms.
    encoding = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    ids: list[int] = encoding.ids
    return ids


def _strings(value: Any) -> list[str]:
    """Return all strings in nested lists and dicts, including keys."""
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
    raise invalid("The messages contain all of the noncharacters U+FDD0 to U+FDEF.", "messages")
