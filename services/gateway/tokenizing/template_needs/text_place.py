"""Place of a text beside calls, for templates that write it elsewhere: behind results, or nowhere.

The template gets the calls without the text, and a mark in the first call's name. Where it has
written the mark, the text is inserted.
"""

import dataclasses
import re
import secrets

from services.gateway.tokenizing.template_needs.single_calls import Messages

_MARK = "\ufffe" + secrets.token_hex(8)
"""Beginning of a mark. No client can guess it, so none of its texts has one."""
_MARKS = re.compile(rf"{_MARK}:(\d+)\ufffe")


@dataclasses.dataclass(frozen=True)
class TextPlace:
    """Place in what a template writes where a text beside calls belongs."""

    header: str
    """What the template writes right before the name of a turn's first call."""
    opening: str = ""
    closing: str = ""
    """What the model writes around a text before a call."""

    def put(self, written: str, texts: list[str]) -> str:
        """Insert texts at the marks of a rendered conversation.

        Args:
            written: the rendered conversation, of messages that `take_texts` returned.
            texts: the texts; one whose place is not found is dropped.
        """
        # Text and number of a mark in turns; results of calls may have their marks too.
        pieces = _MARKS.split(written)
        found: list[str] = []
        placed: set[str] = set()
        for piece, number in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
            header = self._header_at_end(piece) if number and number not in placed else ""
            if header:
                text = self.opening + texts[int(number)] + self.closing
                found += [piece.removesuffix(header), text, header]
            else:
                found.append(piece)
            placed.add(number)
        return "".join(found)

    def _header_at_end(self, text: str) -> str:
        """Return the longest end of the header at the end of a text that begins at a marker.

        Some templates write the first marker only once.
        """
        starts = [at for at, char in enumerate(self.header) if not at or char in "<["]
        headers = (self.header[start:] for start in starts)
        return next((header for header in headers if text.endswith(header)), "")


def take_texts(messages: Messages) -> tuple[Messages, list[str]]:
    """Return messages whose calls have no texts beside them, but marks in names; and the texts.

    Args:
        messages: the messages, which stay as they are.
    """
    found: Messages = []
    texts: list[str] = []
    for message in messages:
        calls, text = message.get("tool_calls"), message.get("content")
        if calls and text and isinstance(text, str):
            function = calls[0]["function"]
            function = {**function, "name": _mark(len(texts)) + function["name"]}
            calls = [{**calls[0], "function": function}, *calls[1:]]
            found.append({**message, "content": "", "tool_calls": calls})
            texts.append(text)
        else:
            found.append(message)
    return found, texts


def _mark(number: int) -> str:
    return f"{_MARK}:{number}\ufffe"
