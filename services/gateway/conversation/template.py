"""Conversations as the dicts that chat templates expect."""

from typing import Any

from services.gateway.conversation.conversation import Conversation, ConversationMessage, Tool


def template_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """Return the messages as chat templates expect them, in the same order.

    Each has `role` and `content`, and `name`, `tool_calls`, `tool_call_id` or `reasoning_content`
    if the message has them.
    """
    return [_message(message) for message in conversation.messages]


def template_tools(conversation: Conversation) -> list[dict[str, Any]] | None:
    """Return the tools as chat templates expect them; None without tools."""
    if not conversation.tools or conversation.tool_choice.mode == "none":
        return None
    return [template_tool(tool) for tool in conversation.tools]


def _message(message: ConversationMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.author is not None:
        fields["name"] = message.author
    if message.reasoning is not None:
        fields["reasoning_content"] = message.reasoning
    if message.calls:
        fields["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ]
    if message.answers is not None:
        fields["tool_call_id"] = message.answers
    return fields


def template_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool as chat templates expect it."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    return {"type": "function", "function": function}
