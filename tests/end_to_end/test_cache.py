"""What a user sees of the block cache: reported hits, a warm restart, a store that dies."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.captured_process import ROOT
from tests.end_to_end.running_lockstep import RunningLockstep

TEXT = " ".join(f"Line {number} of a long text about nothing." for number in range(70))
QUESTION: dict[str, Any] = {
    "model": "lockstep-demo",
    "messages": [
        {"role": "system", "content": TEXT},
        {"role": "user", "content": "What is Lockstep?"},
    ],
    "temperature": 0,
    "max_tokens": 24,
}


@pytest.fixture
def single(tmp_path: Path) -> Iterator[RunningLockstep]:
    """One rank that serves."""
    running = RunningLockstep(tmp_path, 1)
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.close()


def _ask(running: RunningLockstep, body: dict[str, Any] = QUESTION) -> tuple[str, int, str]:
    """Return (text, cached tokens, cache header) of a whole answer."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60.0)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
        assert response.status == http.HTTPStatus.OK, answer
        return (
            answer["choices"][0]["message"]["content"],
            answer["usage"]["prompt_tokens_details"]["cached_tokens"],
            response.headers["x-lockstep-cache"],
        )
    finally:
        connection.close()


def _cache(running: RunningLockstep, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `lockstep cache` on the configuration that runs."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "services.commands.main", "cache", *arguments),
            *("--config", str(running.config_file)),
        ],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _wait_for_records(running: RunningLockstep) -> dict[str, Any]:
    until_s = time.monotonic() + 20.0
    while True:
        stats: dict[str, Any] = json.loads(_cache(running, "stats", "--json").stdout)
        if stats["records"] >= 2:
            return stats
        assert time.monotonic() < until_s, stats


def test_hits_are_reported_and_outlive_a_restart(single: RunningLockstep, tmp_path: Path) -> None:
    """The second answer is the first one's text from memory; after a restart, from SSD."""
    cold, nothing, _ = _ask(single)
    warm, found, header = _ask(single)
    assert (nothing, warm) == (0, cold)
    assert found > 512
    assert f"memory={found}" in header
    stats = _wait_for_records(single)
    assert stats["on"]
    listed = json.loads(_cache(single, "list", "--json").stdout)
    assert sum(folder["records"] for folder in listed["folders"]) == stats["records"]
    single.interrupt()
    assert single.wait() == 0

    again = RunningLockstep(tmp_path, 1)
    try:
        again.wait_until_ready()
        text, restored, header = _ask(again)
        assert text == cold
        assert restored >= 512
        assert f"ssd={restored}" in header
        assert _cache(again, "check").returncode == 0
        assert _cache(again, "clear").returncode == 0
        assert json.loads(_cache(again, "stats", "--json").stdout)["records"] == 0
    finally:
        again.close()


@pytest.mark.proof
def test_a_killed_store_is_not_noticed(single: RunningLockstep) -> None:
    """Without the store answers go on from memory; a new one takes blocks again."""
    cold, _, _ = _ask(single)
    _wait_for_records(single)
    pid = single.children()["cache-store"]
    os.kill(pid, signal.SIGKILL)

    assert _ask(single)[0] == cold
    until_s = time.monotonic() + 30.0
    while single.children().get("cache-store") in (None, pid):
        assert time.monotonic() < until_s
        time.sleep(0.1)
    before = _wait_for_records(single)["records"]
    other = {**QUESTION, "messages": [{"role": "user", "content": TEXT[::-1]}]}
    _ask(single, other)

    until_s = time.monotonic() + 40.0
    while json.loads(_cache(single, "stats", "--json").stdout)["records"] <= before:
        assert time.monotonic() < until_s, single.text
        # Ranks take some seconds to believe in a store again.
        other["messages"][0]["content"] += "!"
        _ask(single, other)


@pytest.mark.proof
def test_a_salt_separates_tenants(single: RunningLockstep) -> None:
    """Another salt finds nothing of a prefix that was just computed."""
    _ask(single, {**QUESTION, "cache_salt": "mine"})

    assert _ask(single, {**QUESTION, "cache_salt": "theirs"})[1] == 0
    assert _ask(single, {**QUESTION, "cache_salt": "mine"})[1] > 512
