"""Text of a call's arguments. Owns that it always is one JSON object.

Clients parse the arguments while they arrive, and give up a session on text that is no JSON. What
was sent cannot be taken back, so from the first character that does not fit, the rest becomes the
text of one more key.
"""

import enum
import re
from typing import Any

import orjson

from services.gateway.conversation.conversation import INVALID_ARGUMENTS
from services.gateway.output import json_text
from services.gateway.output.source import SPACE, Write

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
"""Characters of a string that stand for themselves."""
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_CLOSING = {"{": "}", "[": "]"}
_HEX = frozenset("0123456789abcdefABCDEF")
_CODE_CHARS = 6
"""Length of an escape such as \\u00e9."""


class _State(enum.Enum):
    """Text that may come next."""

    START = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    STRING = enum.auto()
    ESCAPE = enum.auto()
    WORD = enum.auto()
    NEXT = enum.auto()
    """A comma or a closing bracket."""
    WHOLE = enum.auto()
    """White space: the object's last bracket was read, which is written at the end."""
    BROKEN = enum.auto()
    """Any text, which is written as a string."""


class ArgumentsText:
    """JSON object that is written piece by piece.

    Control characters and unknown escapes in strings are mended, and commas before a bracket left
    out. Anything else that is no JSON object breaks it.
    """

    def __init__(self, write: Write) -> None:
        """Begin without text.

        Args:
            write: receives the object's JSON.
        """
        self._write = write
        self._state = _State.START
        self._closers: list[str] = []
        """Closing brackets of the open objects and lists, the outermost first."""
        self._held = ""
        """A comma, word or escape that is not written yet."""
        self._is_key = False
        """The present string is a key."""
        self._has_keys = False

    @property
    def is_broken(self) -> bool:
        """Whether a part of the text did not fit."""
        return self._state is _State.BROKEN

    @property
    def is_whole(self) -> bool:
        """Whether the text was one JSON object from its start to its end."""
        return self._state is _State.WHOLE

    def add(self, text: str) -> None:
        """Add the next piece of text."""
        if self._state is _State.STRING and _PLAIN.fullmatch(text):
            self._write(text)
            return
        if self._state is _State.VALUE and self._is_value(text):
            self._write(self._held + text)
            self._held = ""
            self._state = _State.NEXT
            return
        pieces: list[str] = []
        at = 0
        while at < len(text):
            match self._state:
                case _State.BROKEN:
                    pieces.append(json_text.escaped(text[at:]))
                    break
                case _State.STRING:
                    at = self._read_string(text, at, pieces)
                case _State.ESCAPE:
                    at = self._read_escape(text, at, pieces)
                case _State.WORD:
                    at = self._read_word(text, at, pieces)
                case _:
                    at = self._read_structure(text, at, pieces)
        if pieces:
            self._write("".join(pieces))

    def break_off(self) -> None:
        """Say that the text that follows does not belong to the object."""
        if not self.is_broken:
            pieces: list[str] = []
            self._break(pieces)
            self._write("".join(pieces))

    def end(self) -> None:
        """End the text. An object that was cut off stays incomplete."""
        if self.is_broken:
            self._write('"}')
        elif self.is_whole:
            self._write("}")

    def _is_value(self, text: str) -> bool:
        """Return whether a piece is a whole object or list, of which each part need not be read.

        Some formats have it only at the value's end, and then others wait while it is read.
        """
        if text[:1] not in _CLOSING:
            return False
        try:
            depth = _depth(orjson.loads(text))
        except orjson.JSONDecodeError:
            return False
        return len(self._closers) + depth <= json_text.DEPTH_MAX

    def _read_string(self, text: str, at: int, pieces: list[str]) -> int:
        plain = _PLAIN.match(text, at)
        assert plain is not None
        pieces.append(plain[0])
        at = plain.end()
        if at == len(text):
            return at
        char = text[at]
        if char == '"':
            pieces.append(char)
            self._state = _State.COLON if self._is_key else _State.NEXT
        elif char == "\\":
            self._held = char
            self._state = _State.ESCAPE
        else:
            pieces.append(json_text.escaped(char))
        return at + 1

    def _read_escape(self, text: str, at: int, pieces: list[str]) -> int:
        """Read one character of an escape; one that does not fit is left to the string."""
        char = text[at]
        is_code = self._held != "\\"
        fits = char in _HEX if is_code else char in '"\\/bfnrtu'
        if fits:
            self._held += char
            at += 1
            if self._held == "\\u" or (is_code and len(self._held) < _CODE_CHARS):
                return at
        pieces.append(self._held if fits else f"\\{self._held}")
        self._held = ""
        self._state = _State.STRING
        return at

    def _read_word(self, text: str, at: int, pieces: list[str]) -> int:
        word = _WORD.match(text, at)
        assert word is not None
        self._held += word[0]
        if word.end() == len(text) and len(self._held) <= json_text.NUMBER_CHARS_MAX:
            return word.end()
        self._end_word(pieces)
        return word.end()

    def _end_word(self, pieces: list[str]) -> None:
        found, self._held = self._held, ""
        value = json_text.word(found)
        if value is None:
            self._state = _State.VALUE
            self._break(pieces)
            pieces.append(json_text.escaped(found))
        else:
            pieces.append(value)
            self._state = _State.NEXT

    def _read_structure(self, text: str, at: int, pieces: list[str]) -> int:
        """Read white space, or one character between keys and values."""
        space = SPACE.match(text, at)
        assert space is not None
        if space[0]:
            if self._held:
                self._held += space[0]
            elif self._state not in (_State.START, _State.WHOLE):
                pieces.append(space[0])
            return space.end()
        if not self._take(text[at], pieces):
            self._break(pieces)
            return at
        return at if self._state is _State.WORD else at + 1

    def _take(self, char: str, pieces: list[str]) -> bool:
        """Take a character between keys and values; return whether it fits."""
        state, closer = self._state, self._closers[-1] if self._closers else ""
        match state, char:
            case _State.START, "{":
                self._open(char, pieces)
            case _State.KEY, '"':
                self._has_keys = True
                self._begin(_State.STRING, char, pieces, is_key=True)
            case _State.COLON, ":":
                self._begin(_State.VALUE, char, pieces)
            case _State.VALUE, '"':
                self._begin(_State.STRING, char, pieces)
            case _State.VALUE, "{" | "[" if len(self._closers) < json_text.DEPTH_MAX:
                self._open(char, pieces)
            case _State.NEXT, ",":
                self._held = char
                self._state = _State.KEY if closer == "}" else _State.VALUE
            case (_State.NEXT, "}" | "]") | (_State.KEY, "}") | (_State.VALUE, "]"):
                return self._close(char, pieces)
            case _State.VALUE, _ if _WORD.fullmatch(char):
                self._begin(_State.WORD, "", pieces)
            case _:
                return False
        return True

    def _begin(self, state: _State, text: str, pieces: list[str], *, is_key: bool = False) -> None:
        pieces += [self._held, text]
        self._held = ""
        self._state = state
        self._is_key = is_key

    def _open(self, bracket: str, pieces: list[str]) -> None:
        self._begin(_State.KEY if bracket == "{" else _State.VALUE, bracket, pieces)
        self._closers.append(_CLOSING[bracket])

    def _close(self, bracket: str, pieces: list[str]) -> bool:
        if bracket != self._closers[-1]:
            return False
        self._held = ""
        if len(self._closers) == 1:
            self._state = _State.WHOLE
        else:
            pieces.append(self._closers.pop())
            self._state = _State.NEXT
        return True

    def _break(self, pieces: list[str]) -> None:
        """Close the open strings and brackets, and begin the text of one more key."""
        if self._state is _State.WORD:
            self._end_word(pieces)
            if self.is_broken:
                return
        if self._state is _State.START:
            pieces.append("{")
        if self._state in (_State.STRING, _State.ESCAPE):
            pieces.append('"')
            self._state = _State.COLON if self._is_key else _State.NEXT
        if self._state is _State.COLON:
            pieces.append(": null")
        elif self._state is _State.VALUE and self._closers[-1] == "}":
            pieces.append("null")
        pieces += reversed(self._closers[1:])
        separator = ", " if self._has_keys else ""
        pieces.append(f'{separator}"{INVALID_ARGUMENTS}": "')
        self._held = ""
        self._state = _State.BROKEN


def _depth(value: Any) -> int:
    """Return how deep objects and lists are nested in a value."""
    depth = 0
    level = [value]
    while level:
        depth += 1
        level = [
            part
            for one in level
            for part in (one.values() if isinstance(one, dict) else one)
            if isinstance(part, dict | list)
        ]
    return depth
