"""Source of a completion's text for parsers. Owns waiting for text that has not arrived yet.

A parser is a generator that reads the source from its start, as it would read a file. Where the
text has not arrived, it yields. So a parser's result never depends on how the text was cut.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A read that may wait: it yields until more text has arrived, and returns its result."""
Write = Callable[[str], None]
"""Receiver of text, piece by piece."""

SPACE = re.compile(r"[ \t\r\n]*")
"""White space between the parts of a call."""
SPACE_CHARS_MAX = 64
"""White space after which `Source.is_next` does not look further."""


def drop(_text: str) -> None:
    """Write nothing: text that is read and not passed on."""


class Markers:
    """Texts that are searched for together. None may be the beginning of another."""

    def __init__(self, *texts: str) -> None:
        """Prepare the search.

        Args:
            texts: the markers, none of them empty.
        """
        self.texts = tuple(dict.fromkeys(texts))
        self.chars_max = max(map(len, self.texts), default=1)
        self.whole = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        beginnings = "|".join(map(_beginning, self.texts)) or r"(?!)"
        self.beginning = re.compile(rf"(?:{beginnings})\Z")
        """Matches the beginning of a marker at the end of a text."""


def _beginning(marker: str) -> str:
    """Return the pattern of all beginnings of a marker."""
    pattern = re.escape(marker[-1])
    for char in reversed(marker[:-1]):
        pattern = re.escape(char) + f"(?:{pattern})?"
    return pattern


class Source:
    """Text of one completion, read while it grows."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._start_chars = 0
        """Characters of the completion before `_text`."""
        self._is_ended = False
        self._recorded: list[str] | None = None
        self._record_start_chars = 0
        self._held: list[str] | None = None
        self._hold_start_chars = 0

    @property
    def read_chars(self) -> int:
        """Characters of the completion that were read."""
        return self._start_chars + self._at

    @property
    def final_chars(self) -> int:
        """Characters of the completion that were read before the record and the held text."""
        found = self.read_chars if self._recorded is None else self._record_start_chars
        return found if self._held is None else min(found, self._hold_start_chars)

    def add(self, text: str) -> None:
        """Add the next piece of text."""
        self._text = self._text[self._at :] + text
        self._start_chars += self._at
        self._at = 0

    def end(self) -> None:
        """Say that no text follows; reads no longer wait."""
        self._is_ended = True

    def record(self, text: str = "") -> None:
        """Begin to record the text that is read.

        Args:
            text: first part of the record, which was read before.
        """
        self._recorded = [text]
        self._record_start_chars = self.read_chars - len(text)

    def recorded(self) -> str:
        """End the record and return its text; "" without a record."""
        text = "".join(self._recorded or ())
        self._recorded = None
        return text

    def hold(self) -> None:
        """Begin to hold the text that is read, which may be read again."""
        self._held = []
        self._hold_start_chars = self.read_chars

    @property
    def held(self) -> str:
        """Text that was read since the hold began; "" without a hold."""
        return "".join(self._held or ())

    def release(self) -> None:
        """End the hold; its text stays read."""
        self._held = None

    def rewind(self) -> None:
        """End the hold and put its text back, also out of the record."""
        text = self.held
        if self._recorded and self._held:
            # Both have the same last pieces.
            del self._recorded[-len(self._held) :]
        self.release()
        self._put_back(text)

    def peek(self) -> Reading[str]:
        """Return the next character without reading it, "" at the end."""
        while self._at >= len(self._text):
            if self._is_ended:
                return ""
            yield
        return self._text[self._at]

    def read(self, chars: int) -> Reading[str]:
        """Read and return this many characters, fewer at the end."""
        while len(self._text) - self._at < chars and not self._is_ended:
            yield
        return self._read_to(min(self._at + chars, len(self._text)))

    def unread(self, text: str) -> None:
        """Put back the text that was read last, while nothing is recorded."""
        assert self._recorded is None
        self._put_back(text)

    def _put_back(self, text: str) -> None:
        if len(text) <= self._at:
            self._at -= len(text)
            return
        self._start_chars += self._at - len(text)
        self._text = text + self._text[self._at :]
        self._at = 0

    def take(self, text: str) -> Reading[bool]:
        """Read `text` if it comes next; return whether it did."""
        size = len(text)
        while True:
            found = self._text[self._at : self._at + size]
            if found == text:
                self._read_to(self._at + size)
                return True
            if self._is_ended or not text.startswith(found):
                return False
            yield

    def run(self, pattern: re.Pattern[str], chars_max: int = 1_000_000) -> Reading[str]:
        """Read and return the longest text that matches a pattern.

        Args:
            pattern: a class of characters, repeated.
            chars_max: most characters that are read.
        """
        pieces: list[str] = []
        left = chars_max
        while True:
            match = pattern.match(self._text, self._at, self._at + left)
            assert match is not None
            if match.end() > self._at:
                pieces.append(self._read_to(match.end()))
                left -= len(pieces[-1])
            if self._at < len(self._text) or self._is_ended or not left:
                return "".join(pieces)
            yield

    def copy_run(self, pattern: re.Pattern[str], write: Write) -> Reading[str]:
        """Pass on text that matches a pattern as it arrives; return the character that does not.

        Args:
            pattern: a class of characters, repeated.
            write: receives the text.

        Returns:
            The next character, which is not read; "" at the end.
        """
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None
            if match.end() > self._at:
                write(self._read_to(match.end()))
            if self._at < len(self._text):
                return self._text[self._at]
            if self._is_ended:
                return ""
            yield

    def until(self, markers: Markers, write: Write) -> Reading[str]:
        """Pass on text up to the first marker, and read the marker.

        Only text that may begin a marker is held back.

        Args:
            markers: the markers; of two that begin at one place neither begins the other.
            write: receives the text before the marker.

        Returns:
            The marker; "" if the text ended without one.
        """
        while True:
            found = markers.whole.search(self._text, self._at)
            if found is not None:
                if found.start() > self._at:
                    write(self._read_to(found.start()))
                return self._read_to(found.end())
            end = len(self._text)
            if not self._is_ended:
                held = markers.beginning.search(
                    self._text, max(self._at, end - markers.chars_max + 1)
                )
                end = end if held is None else held.start()
            if end > self._at:
                write(self._read_to(end))
            if self._is_ended:
                return ""
            yield

    def is_next(self, markers: Markers, *, or_end: bool = True) -> Reading[bool]:
        """Return whether a marker comes next after white space, reading nothing.

        Args:
            markers: the markers.
            or_end: the end of the text counts as one.
        """
        while True:
            end = self._at + SPACE_CHARS_MAX + markers.chars_max
            rest = self._text[self._at : end].lstrip(" \t\r\n")
            if markers.whole.match(rest):
                return True
            is_open = not rest or any(marker.startswith(rest) for marker in markers.texts)
            if self._is_ended:
                return or_end and not rest
            if not is_open or len(self._text) >= end:
                return False
            yield

    def _read_to(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._recorded is not None:
            self._recorded.append(text)
        if self._held is not None:
            self._held.append(text)
        return text
