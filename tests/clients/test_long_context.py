"""A context of more than 200,000 tokens, as agents fill it, on two real ranks."""

from pathlib import Path
from typing import Any

import pytest

from tests.clients.agents.catalog import CONTINUE
from tests.clients.model.families import QwenXml
from tests.clients.scripted_ranks import scripted_ranks

pytestmark = pytest.mark.proof
TOKENS_MIN = 200_000
_TOOL = {"type": "function", "function": {"name": "Read", "parameters": {"type": "object"}}}


def test_turn_after_200_000_tokens_is_answered_and_the_next_one_comes_from_the_cache(
    tmp_path: Path,
) -> None:
    """The model still knows the task at the beginning, and the next request computes only its new
    messages."""
    with scripted_ranks(tmp_path, QwenXml(), [CONTINUE]) as ranks:
        task = ranks.tasks[CONTINUE.name]
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": f"{task.request}\n" + "~" * TOKENS_MIN}
        ]
        body = {"model": "scripted", "messages": messages, "tools": [_TOOL]}
        first = ranks.lockstep.post("/v1/chat/completions", body, timeout_s=240.0)
        message = first["choices"][0]["message"]
        [call] = message["tool_calls"]
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": task.old}]
        second = ranks.lockstep.post("/v1/chat/completions", body, timeout_s=60.0)

    assert call["function"]["name"] == "Read"
    assert first["usage"]["prompt_tokens"] > TOKENS_MIN
    assert second["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "Edit"
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"]
