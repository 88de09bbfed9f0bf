"""Input of a custom tool's call, taken out of the arguments that the model wrote. Pure.

The model calls a function with one string argument, so its arguments are JSON such as
`{"input": "text"}`, in pieces. Some models write the text itself, without JSON around it.
"""

import json
import re

_OPENING = re.compile(r'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*"')
_EMPTY = re.compile(r"\s*(?:\{\s*\}\s*)?")
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')
_SURROGATE_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_OPENING_CHARS_MAX = 1_024
"""Longest beginning of an object up to its first string; a longer one is no such object."""
_ESCAPE_CHARS_MAX = 12
"""Characters of a pair of surrogates, the longest escape."""


class CustomInput:
    """Reader of one call's arguments: gives the text of the first string in a JSON object.

    Arguments that do not begin with an object whose first value is a string are the text as they
    are. The result does not depend on how the arguments are cut into pieces.
    """

    def __init__(self) -> None:
        self._held = ""
        """Text that was not returned yet: an unknown beginning, or part of an escape."""
        self._state = "opening"
        """`opening`, `string` (inside the first string), `over` (after it), or `raw`."""

    def push(self, text: str) -> str:
        """Add a piece of the arguments; return the input's next characters."""
        self._held += text
        if self._state == "opening":
            found = _OPENING.match(self._held, 0, _OPENING_CHARS_MAX)
            if found is not None:
                self._state, self._held = "string", self._held[found.end() :]
            elif self._may_open():
                return ""
            else:
                self._state = "raw"
        if self._state == "string":
            return self._read_string(is_final=False)
        if self._state == "over":
            self._held = ""
        return self._take()

    def finish(self) -> str:
        """Return the rest of the input, at the end of the arguments."""
        if self._state == "string":
            return self._read_string(is_final=True)
        # An empty object or no arguments are an empty input.
        return self._take() if _EMPTY.fullmatch(self._held) is None else ""

    def _take(self) -> str:
        taken, self._held = self._held, ""
        return taken

    def _may_open(self) -> bool:
        """Whether more text may make the held text the beginning of an object with a string."""
        if len(self._held) >= _OPENING_CHARS_MAX:
            return False
        rest = self._held.lstrip()
        if not rest or rest == "{":
            return True
        if not rest.startswith("{"):
            return False
        after = rest[1:].strip()
        if after in ("", "}"):
            return True
        key = re.match(r'"(?:[^"\\]|\\.)*', after, re.DOTALL)
        if key is None:
            return False
        tail = after[key.end() :]
        # An escape cut in half is part of the key.
        return tail in ("", "\\") or re.fullmatch(r'"\s*:?\s*', tail) is not None

    def _read_string(self, *, is_final: bool) -> str:
        pieces: list[str] = []
        held, start = self._held, 0
        while True:
            found = _QUOTE_OR_ESCAPE.search(held, start)
            end = len(held) if found is None else found.start()
            pieces.append(held[start:end])
            start = end
            if found is None:
                break
            if found[0] == '"':
                self._state, start = "over", len(held)
                break
            if len(held) - end < _ESCAPE_CHARS_MAX and not is_final and _is_cut(held[end:]):
                break
            text, length = _unescape(held, end)
            pieces.append(text)
            start = end + length
        self._held = held[start:]
        return "".join(pieces)


def _is_cut(text: str) -> bool:
    """Whether an escape at the beginning of a text may continue after its end."""
    if re.fullmatch(r"\\(?:u[0-9a-fA-F]{0,3})?", text):
        return True
    half = r"\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?"
    return re.fullmatch(half, text) is not None


def _unescape(text: str, start: int) -> tuple[str, int]:
    """Return the characters of the escape at `start` and its length; a broken one as it is."""
    found = _SURROGATE_PAIR.match(text, start) or _ESCAPE.match(text, start)
    if found is None:
        return text[start], 1
    value: str = json.loads(f'"{found[0]}"')
    # Half of a pair is no character, and could not be sent as UTF-8.
    return ("\ufffd" if "\ud800" <= value <= "\udfff" else value), len(found[0])
