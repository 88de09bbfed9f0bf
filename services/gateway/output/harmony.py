"""Harmony, the format of gpt-oss: messages in channels, with a recipient if they call a tool."""

import re

from services.gateway.output import json_text
from services.gateway.output.calls.call_format import CallContext
from services.gateway.output.source import SPACE, Markers, Reading, drop

_MESSAGE = "<|message|>"
_START = "<|start|>"
_CHANNEL_MARKER = "<|channel|>"
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ENDS = Markers("<|end|>", "<|call|>", "<|return|>", _START)
"""Markers at which a message ends."""
_HEADER_ENDS = Markers(_MESSAGE, *_ENDS.texts)
_TEXT_ENDS = Markers(_CHANNEL_MARKER, *_ENDS.texts)
_HEADER_STARTS = Markers(_CHANNEL_MARKER, "<|constrain|>", _MESSAGE, "to=", *_ENDS.texts)
_NEXT = f"{_START}assistant"
"""Text between two messages of one turn."""
_HEADER = re.compile(
    r"[^<]{0,400}(?:<\|channel\|>[^<]{0,400})?(?:<\|constrain\|>[^<]{0,400})?<\|message\|>"
)
"""A header after the name of its author: text, channel and more, form of the content."""
_PEOPLE = ("assistant", "user", "system", "developer", "all")
"""Recipients that are no tools."""


class Harmony:
    """Messages of gpt-oss: its analysis is reasoning, and commentary to a function is a call.

    Stateless: one serves all completions. It is no `CallFormat`, because the text of the answer
    stands between markers too.
    """

    openings = (_CHANNEL_MARKER,)
    """Markers at which messages begin."""
    special_texts = (*_HEADER_ENDS.texts, "<|constrain|>")
    """Further texts of the format that may be special tokens."""
    text_opening = f"{_CHANNEL_MARKER}commentary{_MESSAGE}"
    text_closing = f"<|end|>{_NEXT}"
    """What the model writes around a text before a call."""

    def read(
        self, context: CallContext, prompt_tail: str, *, has_tools: bool, has_reasoning: bool
    ) -> Reading[None]:
        """Read a whole completion.

        Args:
            context: reads the text and receives the calls.
            prompt_tail: end of the prompt, in which the first message may have begun.
            has_tools: the model may call tools; without them, a call is text.
            has_reasoning: the analysis is reasoning; else it is text.
        """
        source, writer = context.source, context.writer
        reasoning = writer.reasoning if has_reasoning else writer.text
        header = prompt_tail.rpartition(_START)[2]
        marker = _MESSAGE if header.endswith(_MESSAGE) else ""
        if not marker:
            header = ""
        while True:
            if marker != _MESSAGE:
                header, marker = yield from self._read_header(context)
            if marker == _MESSAGE:
                tool = _tool(header) if has_tools else ""
                channel = _CHANNEL.search(header)
                if tool:
                    yield from self._read_call(context, tool)
                elif channel and channel[1] == "analysis":
                    yield from source.until(_ENDS, reasoning)
                    writer.end_reasoning()
                else:
                    yield from source.until(_ENDS, writer.text)
            elif not marker and not (yield from source.peek()):
                return
            marker = ""

    @staticmethod
    def simplify(text: str) -> str:
        """Return messages with equal headers where they mean the same.

        The model writes `commentary to=functions.NAME`, the template puts the recipient first.

        Args:
            text: messages; the first begins in its header.
        """
        # A search for headers in the whole text would hold the interpreter lock for long.
        return _NEXT.join(map(_with_simple_header, text.split(_NEXT)))

    def _read_header(self, context: CallContext) -> Reading[tuple[str, str]]:
        """Read up to the next message; return its header and the marker after it."""
        source = context.source
        pieces: list[str] = []
        yield from source.take("assistant")
        source.record()
        if (yield from source.is_next(_HEADER_STARTS, or_end=False)):
            marker = yield from source.until(_HEADER_ENDS, pieces.append)
            text = source.recorded()
            if not marker and "<|" not in text:
                # It only begins like a header.
                context.writer.text(text)
        else:
            source.recorded()
            # Text without a header, as models write it now and then.
            marker = yield from source.until(_TEXT_ENDS, context.writer.text)
            if marker == _CHANNEL_MARKER:
                pieces.append(marker)
                marker = yield from source.until(_HEADER_ENDS, pieces.append)
        return "".join(pieces), marker

    def _read_call(self, context: CallContext, tool: str) -> Reading[None]:
        source = context.source
        context.begin(tool, is_certain=True)
        yield from source.run(SPACE)
        if (yield from source.peek()) == "<":
            context.write("{}")
            yield from source.until(_ENDS, drop)
        elif (yield from json_text.copy_value(source, context.write)):
            yield from source.until(_ENDS, drop)
        else:
            yield from context.break_off(_ENDS, "the arguments are no JSON object")
        context.end()
        context.take_layout()


def _tool(header: str) -> str:
    """Return the name of the tool that a header calls; "" if it calls none."""
    recipient = _RECIPIENT.search(header)
    if recipient is None or recipient[1] in _PEOPLE:
        return ""
    return recipient[1].removeprefix("functions.")


def _with_simple_header(message: str) -> str:
    """Return a message whose header has only channel and recipient, in this order."""
    header = _HEADER.match(message)
    if header is None:
        return message
    recipient = _RECIPIENT.search(header[0])
    channel = _CHANNEL.search(header[0])
    names = (channel[1] if channel else "", recipient[1] if recipient else "")
    simple = f"{_CHANNEL_MARKER}{' to='.join(filter(None, names))}{_MESSAGE}"
    return simple + message[header.end() :]
