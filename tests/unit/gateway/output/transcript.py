"""Golden transcripts: a completion and the output that it means, and the tools that are called."""

import dataclasses
import json
from typing import Any

from services.gateway.conversation.conversation import Tool

TOOLS = [
    Tool(
        "edit-file",
        parameters={
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "text": {"type": "string"},
                "line": {"type": "integer"},
                "ratio": {"type": "number"},
                "force": {"type": "boolean"},
                "owner": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "limit": {"type": ["integer", "null"]},
                "ranges": {"type": "array", "items": {"type": "integer"}},
                "options": {"$ref": "#/$defs/options"},
                "anything": {},
            },
            "$defs": {"options": {"type": "object"}},
        },
    ),
    Tool("now"),
]

HARD_TEXT = 'He said "hi"\n\tto </b> \\ Grüße 漢字 🎉 {[,]}'
"""A value with quotes, a backslash, line ends, brackets and letters beyond ASCII."""

Call = tuple[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Transcript:
    """A completion and the output that it means."""

    name: str
    tool_format: str
    text: str
    answer: str = ""
    """The text that is neither reasoning nor a call."""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""
    reasoning_format: str = "off"
    prompt_tail: str = ""
    is_cut: bool = False
    """The last call is cut off, so its arguments are no whole JSON."""


def as_json(value: Any) -> str:
    """Return a value as JSON, as models write it."""
    return json.dumps(value, ensure_ascii=False)


def hermes_call(name: str, arguments: Any) -> str:
    """Return a call as Qwen and Hermes write it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {as_json(arguments)}}}\n</tool_call>'


EDIT = {"path": "a.py", "text": HARD_TEXT, "line": 3, "force": True, "owner": None}
NOW: Call = ("now", {})
EDIT_CALL: Call = ("edit-file", EDIT)
BOTH = (EDIT_CALL, NOW)
CLOSERS = "a </tool_call> b </function> c </parameter> d </arg_value> e </invoke>"
CLOSERS_CALL: Call = ("edit-file", {"text": CLOSERS})
PARIS: Call = ("edit-file", {"path": "Paris"})
