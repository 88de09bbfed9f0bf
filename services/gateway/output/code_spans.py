"""Code in Markdown text. Owns whether a text that is still growing ends inside code."""

import re

_PART = re.compile(r"`+|\n|[^`\n]+")
_FENCE_TICKS = 3
"""Fewest backticks that open a block of code."""


class CodeSpans:
    """Follows the backticks of a text: spans in a paragraph, and blocks between fences."""

    def __init__(self) -> None:
        self._ticks = 0
        """Backticks at the end of the text."""
        self._span_ticks = 0
        """Backticks that opened the present span; 0: none is open."""
        self._is_fresh_span = False
        """Nothing follows the backticks that opened the present span."""
        self._is_quote = False
        """The present span began with a marker of calls."""
        self._fence_ticks = 0
        """Backticks that opened the present block; 0: none is open."""
        self._is_fence_line = False
        """The present line opened the block."""
        self._is_blank = True
        """Only white space was read of the present line."""

    @property
    def is_quote(self) -> bool:
        """Whether the text ends in a span that began with a marker of calls."""
        return bool(self._span_ticks) and self._is_quote

    @property
    def is_open(self) -> bool:
        """Whether the text ends inside code."""
        return bool(self._span_ticks or self._fence_ticks)

    def meet_marker(self) -> None:
        """Note that a marker of calls follows the text."""
        self._read_ticks()
        self._is_quote |= self._is_fresh_span

    def add(self, text: str) -> None:
        """Add the next piece of the text."""
        is_inside = not (self._ticks or self._is_blank or self._is_fresh_span)
        if is_inside and "`" not in text and "\n" not in text:
            return
        for part in _PART.findall(text):
            if part[0] == "`":
                self._ticks += len(part)
                continue
            self._read_ticks()
            self._is_fresh_span = False
            if part == "\n":
                if self._is_blank:
                    self._span_ticks = 0
                self._is_blank = True
                self._is_fence_line = False
            elif not part.isspace():
                self._is_blank = False

    def _read_ticks(self) -> None:
        """Read the backticks at the text's end, which no further one follows."""
        ticks, self._ticks = self._ticks, 0
        if not ticks:
            return
        is_fence = self._is_blank and ticks >= _FENCE_TICKS
        self._is_blank = False
        self._is_fresh_span = False
        if self._fence_ticks:
            # A line with backticks after its first ones opens no block, but has a span.
            if self._is_fence_line or (is_fence and ticks >= self._fence_ticks):
                self._fence_ticks = 0
        elif is_fence:
            self._fence_ticks = ticks
            self._is_fence_line = True
            self._span_ticks = 0
        elif not self._span_ticks:
            self._span_ticks = ticks
            self._is_fresh_span = True
            self._is_quote = False
        elif self._span_ticks == ticks:
            self._span_ticks = 0
