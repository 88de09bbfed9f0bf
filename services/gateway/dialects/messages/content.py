"""Text of content blocks. Owns what each kind of block becomes in a prompt.

`cache_control` is dropped here: the same block has it in one turn and not in the next.
"""

import re
from typing import Any, TypeVar

from services.gateway.conversation.conversation import Tool
from services.gateway.conversation.template import template_tool
from services.gateway.dialects.messages import request_types
from services.gateway.http import request_body
from services.gateway.http.errors import invalid_field

T = TypeVar("T")

BILLING_HEADER = "x-anthropic-billing-header:"
"""First text of a line that Claude Code puts before its instructions. It differs from session to
session, so that no two would share a cached prefix."""
SEPARATOR = "\n\n"
"""Text between two blocks of one message."""

_BILLING_LINES = re.compile(rf"(?:{re.escape(BILLING_HEADER)}[^\n]*+\n*+)*+")
"""Billing lines at the start of a text, found in one pass however many there are."""
_UNREPORTED = frozenset({"type", "cache_control", "citations", "signature", "caller"})
"""Fields of blocks that have no meaning for a model."""


class BlockReader:
    """Reader of one request's content blocks; collects the paths of those without effect."""

    def __init__(self, tools: dict[str, Tool]) -> None:
        """Begin to read.

        Args:
            tools: all tools of the request by name, for references to them.
        """
        self._tools = tools
        self._written: set[str] = set()
        """Names of the tools that a reference has written out."""
        self.has_cache_control = False
        """A block had `cache_control`."""
        self.ignored: dict[str, None] = {}
        """Paths of fields and kinds of blocks without effect, a set in order."""

    def text(self, content: str | list[dict[str, Any]], param: str) -> str:
        """Return the joined text of content blocks.

        Args:
            content: the blocks, or their text.
            param: path of the content in the request, for errors.

        Raises:
            ApiError: 400 when a known block lacks a field; it names the field.
        """
        if isinstance(content, str):
            return content
        texts = [self.block_text(block, f"{param}[{at}]") for at, block in enumerate(content)]
        return SEPARATOR.join(text for text in texts if text)

    def kind(self, block: dict[str, Any], param: str) -> str:
        """Return the kind of a block, and note whether it has `cache_control`.

        Raises:
            ApiError: 400 when it has none.
        """
        kind = block.get("type")
        if not isinstance(kind, str):
            raise invalid_field(f"{param}.type", "it must be the kind of the block, a text.")
        self.has_cache_control |= block.get("cache_control") is not None
        return kind

    def convert(self, block: dict[str, Any], kind: type[T], param: str) -> T:
        """Return a block as a struct; its other fields have no effect.

        Raises:
            ApiError: 400 when it does not fit the struct; it names the field.
        """
        known: tuple[str, ...] = kind.__struct_fields__  # type: ignore[attr-defined]
        for name in block.keys() - _UNREPORTED - set(known):
            self.ignored[f"messages.content.{name}"] = None
        return request_body.convert(block, kind, param)

    def block_text(self, block: dict[str, Any], param: str) -> str:
        """Return the text that a block becomes in the prompt, "" for none.

        Args:
            block: the block.
            param: its path in the request, for errors.

        Raises:
            ApiError: 400 when a known block lacks a field; it names the field.
        """
        match kind := self.kind(block, param):
            case "text":
                return self.convert(block, request_types.TextBlock, param).text
            case "tool_reference":
                named = self.convert(block, request_types.ToolReferenceBlock, param).tool_name
                return self._tool_text(named)
            case "document":
                document = self.convert(block, request_types.DocumentBlock, param)
                return self._document_text(document, f"{param}.source.content")
            case "search_result":
                found = self.convert(block, request_types.SearchResultBlock, param)
                content = self.text(found.content, f"{param}.content")
                return f"{found.title}\n{found.source}\n{content}"
            case "image":
                self.ignored["messages.content.image"] = None
                return "[An image stood here. This model reads only text.]"
            case _:
                self.ignored[f"messages.content.{kind}"] = None
                return ""

    def _tool_text(self, name: str) -> str:
        tool = self._tools.get(name)
        if tool is None:
            self.ignored["messages.content.tool_reference"] = None
            return ""
        if name in self._written:
            # A reference is short and a tool may be long: many references must not make a text
            # that is longer than the request by orders of magnitude.
            return f"The tool {name} can be called from now on, as written above."
        self._written.add(name)
        shown = request_body.to_json(template_tool(tool)).decode()
        return f"The tool {name} can be called from now on:\n{shown}"

    def _document_text(self, document: request_types.DocumentBlock, param: str) -> str:
        source = document.source
        if source.type == "text":
            text = source.data
        elif source.type == "content":
            text = self.text(source.content, param)
        else:
            self.ignored[f"messages.content.document.{source.type}"] = None
            text = "[A document stood here. This model reads only text.]"
        return "\n".join(filter(None, (document.title, document.context, text)))


def without_billing_header(
    system: str | list[dict[str, Any]],
) -> str | list[dict[str, Any]]:
    """Return instructions without the billing lines at their start."""
    if isinstance(system, str):
        return _BILLING_LINES.sub("", system, count=1)
    start = 0
    while start < len(system) and _is_billing(system[start]):
        start += 1
    return system[start:]


def _is_billing(block: dict[str, Any]) -> bool:
    text = block.get("text")
    return isinstance(text, str) and text.startswith(BILLING_HEADER)
