"""JSON that is read while it arrives. Owns copying values, and mending what models write wrongly.

Mended are line ends and other control characters in strings, escapes that JSON does not have, and
Python's names of true, false and null. Everything else that is no JSON ends the copy.
"""

import re

import msgspec
import orjson

from services.gateway.output.source import SPACE, Reading, Source, Write

DEPTH_MAX = 128
"""Deepest nesting of a value; deeper ones are taken for broken."""
NUMBER_CHARS_MAX = 400
NAME_CHARS_MAX = 256

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
"""Characters of a string that stand for themselves."""
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?\Z")
_HEX = re.compile(r"[0-9a-fA-F]{4}\Z")
_WORDS = {
    "true": "true", "false": "false", "null": "null",
    "True": "true", "False": "false", "None": "null",
}  # fmt: skip
_UNESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


def escaped(text: str) -> str:
    """Return text as it stands inside a JSON string."""
    return orjson.dumps(text).decode()[1:-1]


def word(text: str) -> str | None:
    """Return a number, true, false or null as JSON; None for any other text."""
    found = _WORDS.get(text)
    return text if found is None and _NUMBER.match(text) else found


def copy_value(source: Source, write: Write) -> Reading[bool]:
    """Copy a JSON value, piece by piece.

    Args:
        source: the text; white space before the value is copied too.
        write: receives the JSON.

    Returns:
        Whether it was a whole value. If not, everything before the first character that does not
        fit has been copied.
    """
    closers: list[str] = []
    while True:
        char = yield from source.copy_run(SPACE, write)
        if char == '"':
            if not (yield from _copy_string(source, write)):
                return False
        elif char and char in "{[":
            write((yield from source.read(1)))
            closers.append("}" if char == "{" else "]")
            char = yield from source.copy_run(SPACE, write)
            if char != closers[-1]:
                if len(closers) > DEPTH_MAX:
                    return False
                if closers[-1] == "}" and not (yield from _copy_key(source, write)):
                    return False
                continue
        else:
            text = yield from source.run(_WORD, NUMBER_CHARS_MAX)
            value = word(text)
            write(text if value is None else value)
            if value is None:
                return False
        while closers:
            char = yield from source.copy_run(SPACE, write)
            if char not in (",", closers[-1]):
                return False
            write((yield from source.read(1)))
            if char == ",":
                if (yield from source.copy_run(SPACE, write)) == closers[-1]:
                    # One comma too many.
                    continue
                if closers[-1] == "}" and not (yield from _copy_key(source, write)):
                    return False
                break
            closers.pop()
        else:
            return True


def _copy_key(source: Source, write: Write) -> Reading[bool]:
    char = yield from source.copy_run(SPACE, write)
    if char != '"' or not (yield from _copy_string(source, write)):
        return False
    char = yield from source.copy_run(SPACE, write)
    if char == ":":
        write((yield from source.read(1)))
    return char == ":"


def _copy_string(source: Source, write: Write) -> Reading[bool]:
    write((yield from source.read(1)))
    is_whole = yield from copy_content(source, write)
    if is_whole:
        write('"')
    return is_whole


def copy_content(source: Source, write: Write) -> Reading[bool]:
    """Copy the rest of a JSON string after its first quote, and read its last quote.

    Every escape is one piece.

    Returns:
        Whether the string ended; False at the end of the text.
    """
    while True:
        char = yield from source.copy_run(_PLAIN, write)
        if not char:
            return False
        yield from source.read(1)
        if char == '"':
            return True
        if char != "\\":
            write(escaped(char))
            continue
        kind = yield from source.read(1)
        if kind == "u":
            code = yield from source.read(4)
            write(("\\u" if _HEX.match(code) else "\\\\u") + code)
        elif kind == "'":
            write("'")
        elif kind:
            # A pattern such as \d, whose backslash was not escaped.
            write(f"\\{kind}" if kind in '"\\/bfnrt' else "\\\\" + escaped(kind))


def read_string(source: Source, chars_max: int = NAME_CHARS_MAX) -> Reading[str | None]:
    """Read a JSON string and return its value; None if no string comes or it is too long."""
    if not (yield from source.take('"')):
        return None
    pieces: list[str] = []
    read = 0
    while True:
        text = yield from source.run(_PLAIN, chars_max - read + 1)
        pieces.append(text)
        read += len(text)
        char = yield from source.peek()
        if char == '"':
            yield from source.read(1)
            return _decoded("".join(pieces))
        if char != "\\" or read > chars_max:
            return None
        pieces.append((yield from source.read(2)))
        read += 2


def _decoded(content: str) -> str | None:
    try:
        return msgspec.json.decode(f'"{content}"'.encode(), type=str)
    except (msgspec.DecodeError, UnicodeError):
        return None


def unescaped(piece: str) -> str:
    """Return what a piece of `copy_content` stands for, if the string has JSON in it.

    Codes beyond ASCII stay escapes, which mean the same in the inner JSON.
    """
    if not piece.startswith("\\"):
        return piece
    if piece[1] != "u":
        return _UNESCAPED.get(piece[1], piece[1:])
    code = int.from_bytes(bytes.fromhex(piece[2:]))
    return chr(code) if code < 0x80 else piece
