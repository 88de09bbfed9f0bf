"""Memory of all processes under many requests with grammars, tools and every dialect.

`make memory` sends 10,000 requests and prints how each process grew; `make proofs` fewer.
"""

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.end_to_end.running_lockstep import RunningLockstep

_REQUESTS = int(os.environ.get("LOCKSTEP_TEST_REQUESTS", "600"))
_RANKS = 2
_WARM_UP_REQUESTS = _REQUESTS // 3
"""Requests after which caches of bounded size are full."""
_GROWTH_BYTES_MAX = 32 * 1024 * 1024
"""Largest growth of a process afterwards, however many requests follow."""
_SAMPLES = 5
"""Number of times that the memory is measured after that."""
_MIB = 1024 * 1024
_KV_BYTES = 64 * 1024 * 1024
"""Memory for KV, which is soon full."""
_CLIENTS = 16


def _schema(number: int) -> dict[str, Any]:
    """Return a schema; every fourth one is new, the others repeat."""
    names = [f"field{number if number % 4 == 0 else number % 16}", "b"]
    properties: dict[str, Any] = {name: {"type": "boolean"} for name in names}
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


def _body(number: int) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request; they take turns between dialects and features."""
    common = {"model": "lockstep-demo"}
    user = {"role": "user", "content": f"Question {number}"}
    function = {"name": "act", "parameters": _schema(number)}
    kinds: list[tuple[str, dict[str, Any]]] = [
        (
            "/v1/chat/completions",
            {
                "messages": [user],
                "max_tokens": 8,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": _schema(number)},
                },
            },
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [user],
                "max_tokens": 8,
                "stream": True,
                "tools": [{"type": "function", "function": {**function, "strict": True}}],
                "tool_choice": "required",
            },
        ),
        (
            "/v1/messages",
            {
                "messages": [user],
                "max_tokens": 8,
                "stream": True,
                "tools": [{"name": "act", "input_schema": _schema(number)}],
                "tool_choice": {"type": "any"},
            },
        ),
        (
            "/v1/responses",
            {
                "input": [user],
                "max_output_tokens": 8,
                "store": False,
                "tools": [{"type": "function", **function}],
            },
        ),
        ("/v1/completions", {"prompt": f"{number}", "max_tokens": 8, "guided_regex": "[a-c]{4}"}),
    ]
    path, body = kinds[number % len(kinds)]
    return path, {**common, **body}


async def _send(port: int, first: int, count: int) -> None:
    """Send requests with these numbers, several at once; every one must succeed."""
    numbers = itertools.count(first)
    limit = first + count
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:

        async def client() -> None:
            while (number := next(numbers)) < limit:
                path, body = _body(number)
                async with session.post(path, json=body) as answer:
                    content = await answer.read()
                    assert answer.status == 200, content
                    assert b'"error":{' not in content, content

        await asyncio.gather(*(client() for _ in range(_CLIENTS)))


def _memory(running: RunningLockstep) -> dict[str, int]:
    """Return the resident memory of each process in bytes by its role."""
    return {role: psutil.Process(pid).memory_info().rss for role, pid in running.children().items()}


@pytest.mark.proof
def test_memory_does_not_grow_over_thousands_of_requests_with_grammars_and_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grammars, tools and dialects of all kinds cost no memory once the caches are full."""
    monkeypatch.setenv("LOCKSTEP_RANK_WORKER_KV_BYTES_MAX", str(_KV_BYTES))
    monkeypatch.setenv("LOCKSTEP_CACHE_RESIDENT_BYTES_MAX", str(_KV_BYTES // 4))
    # The index of stored blocks and the turns in memory grow until these are full.
    monkeypatch.setenv("LOCKSTEP_CACHE_SSD_BYTES_MAX", str(_KV_BYTES // 4))
    monkeypatch.setenv("LOCKSTEP_GATEWAY_REPLAY_BYTES_MAX", str(_MIB))
    running = RunningLockstep(tmp_path, _RANKS)
    try:
        running.wait_until_ready()
        asyncio.run(_send(running.port, 0, _WARM_UP_REQUESTS))
        samples = [_memory(running)]
        part = (_REQUESTS - _WARM_UP_REQUESTS) // _SAMPLES
        for number in range(_SAMPLES):
            asyncio.run(_send(running.port, _WARM_UP_REQUESTS + number * part, part))
            samples.append(_memory(running))
        before = samples[0]
        print(f"MiB after {_WARM_UP_REQUESTS} requests, and after each {part} more:")
        for role in before:
            print(f"{role}:", *(f"{sample[role] / _MIB:.1f}" for sample in samples))
        assert all(sample.keys() == before.keys() for sample in samples)
        grown = {role: samples[-1][role] - before[role] for role in before}
        assert all(one < _GROWTH_BYTES_MAX for one in grown.values()), grown
    finally:
        running.close()
