"""Token ids to text, one token at a time.

Never half a character, and all pieces together are exactly what decoding all tokens at once gives.
"""

import codecs
from collections.abc import Callable
from typing import Protocol

from services.gateway.tokenizing.vocabulary import Vocabulary

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are no character, or not yet one."""

WINDOW_TOKENS_MAX = 64
"""Longest run of tokens that is decoded again for each new one, in tokenizers of no known kind."""


class Detokenizer(Protocol):
    """One completion's text."""

    def add(self, token: int) -> str:
        """Take the next token; return the text that is now certain, often "" ."""
        ...

    def finish(self) -> str:
        """Return what is left; an unfinished character becomes U+FFFD."""
        ...


class ByteLevelDetokenizer:
    """For byte-level BPE: bytes of tokens go through an incremental UTF-8 decoder."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._texts = vocabulary.texts
        self._count = len(vocabulary.texts)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_midway = False

    def add(self, token: int) -> str:
        """Return the characters that are complete."""
        if token >= self._count:
            return ""
        if not self._is_midway:
            text = self._texts[token]
            if text is not None:
                return text
        text = self._decoder.decode(self._token_bytes[token])
        self._is_midway = self._decoder.getstate()[0] != b""
        return text

    def finish(self) -> str:
        """Return U+FFFD for an unfinished character."""
        self._is_midway = False
        return self._decoder.decode(b"", True)


class ByteFallbackDetokenizer:
    """For pieces with byte fallback: a run of byte tokens is judged as a whole, as tokenizers do.

    So a run is held back until it ends: it is text if all of it is UTF-8, else one U+FFFD per byte.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._texts = vocabulary.texts
        self._count = len(vocabulary.texts)
        self._run = bytearray()
        self._must_strip = vocabulary.strips_first_space

    def add(self, token: int) -> str:
        """Return the text of a piece, with the run of bytes before it."""
        if token >= self._count:
            return ""
        text = self._texts[token]
        if text is None:
            self._run += self._token_bytes[token]
            return ""
        if not text:
            return ""
        if self._run:
            text = self._end_run() + text
        return self._stripped(text) if self._must_strip else text

    def finish(self) -> str:
        """Return the run of bytes at the end."""
        text = self._end_run()
        return self._stripped(text) if self._must_strip else text

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        if text:
            self._must_strip = False
        return text.removeprefix(" ")


class WindowDetokenizer:
    """For any other tokenizer: decodes the last few tokens again and takes what is new.

    The window begins at a token before which everything was sent, so pieces keep the left
    neighbour that decides about their space.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._sent_tokens = 0
        self._sent_text = ""

    def add(self, token: int) -> str:
        """Return the new text, unless it ends in what may be half a character."""
        self._window.append(token)
        is_full = len(self._window) - self._sent_tokens >= WINDOW_TOKENS_MAX
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and not is_full:
            return ""
        new = text[len(self._sent_text) :]
        if new or is_full:
            self._move()
        return new

    def finish(self) -> str:
        """Return what was held back."""
        new = self._decode(self._window)[len(self._sent_text) :]
        self._move()
        return new

    def _move(self) -> None:
        """Begin the window with the tokens that were sent now."""
        del self._window[: self._sent_tokens]
        self._sent_tokens = len(self._window)
        self._sent_text = self._decode(self._window)
