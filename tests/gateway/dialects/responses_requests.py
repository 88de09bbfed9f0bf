"""Requests of the Responses API for tests, and a reader of its streams."""

import http.client
import json
from typing import Any

from tests.gateway.running_gateway import RESPONSE_S, RunningGateway

Json = dict[str, Any]
APPLY_PATCH = "*** Begin Patch\n*** Add File: a.txt\n+Grüße 🎉\n*** End Patch"


def call(name: str, **arguments: Any) -> str:
    """Return a tool call as the tiny model writes it."""
    content = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{content}\n</tool_call>"


def codex_request(*items: Json) -> Json:
    """Return a request in the form that Codex sends, with these items after its first two."""
    function = {
        "type": "function",
        "name": "exec_command",
        "description": "Runs a command in a PTY.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"cmd": {"type": "string"}},
            "required": ["cmd"],
            "additionalProperties": False,
        },
    }
    patch = {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin_patch /.+/s"},
    }
    spawn = {"type": "function", "name": "spawn_agent", "strict": False, "parameters": {}}
    return {
        "model": "tiny",
        "stream": True,
        "store": False,
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "You are an agent. " * 100}],
            },
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "Hello"}],
            },
            *items,
        ],
        "tools": [
            function,
            {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [spawn]},
            patch,
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "text": {"verbosity": "low"},
        "prompt_cache_key": "019a-session",
        "client_metadata": {"x-codex-installation-id": "abc"},
    }


def stream(gateway: RunningGateway, body: Json) -> tuple[list[Json], dict[str, str]]:
    """Post a request with `stream`; return its events and the headers."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=RESPONSE_S)
    try:
        data = json.dumps({**body, "stream": True}).encode()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/responses", data, headers)
        response = connection.getresponse()
        content = response.read().decode()
        assert response.status == 200, content
        fields = {name.lower(): value for name, value in response.getheaders()}
    finally:
        connection.close()
    blocks = [block for block in content.split("\n\n") if block and not block.startswith(":")]
    return [json.loads(block.partition("data: ")[2]) for block in blocks], fields
