"""Cache hits, a restart with a warm SSD cache, and a killed cache store, as a client sees them."""

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.running_lockstep import RunningLockstep, running_lockstep
from tests.support.captured_process import ROOT
from tests.support.waiting import wait_until

LONG_TEXT = " ".join(f"Line {number} of a long text about nothing." for number in range(70))
QUESTION: dict[str, Any] = {
    "model": "lockstep-demo",
    "messages": [
        {"role": "system", "content": LONG_TEXT},
        {"role": "user", "content": "What is Lockstep?"},
    ],
    "temperature": 0,
    "max_tokens": 24,
}


@pytest.fixture
def single(tmp_path: Path) -> Iterator[RunningLockstep]:
    """One rank that is ready."""
    with running_lockstep(tmp_path) as running:
        yield running


def _ask(running: RunningLockstep, body: dict[str, Any] = QUESTION) -> tuple[str, int, str]:
    """Return the text, the number of cached tokens and the cache header of an answer."""
    status, content, headers = running.exchange("/v1/chat/completions", body)
    assert status == http.HTTPStatus.OK, content
    answer = json.loads(content)
    return (
        answer["choices"][0]["message"]["content"],
        answer["usage"]["prompt_tokens_details"]["cached_tokens"],
        headers["x-lockstep-cache"],
    )


def _cache(running: RunningLockstep, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `lockstep cache` with the configuration of this Lockstep."""
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


def _wait_for_stored_records(running: RunningLockstep) -> dict[str, Any]:
    """Wait until the store has two records or more; return its statistics."""
    wait_until(lambda: _cache_stats(running)["records"] >= 2, 20.0, poll_s=0.0)
    return _cache_stats(running)


def _cache_stats(running: RunningLockstep) -> dict[str, Any]:
    stats: dict[str, Any] = json.loads(_cache(running, "stats", "--json").stdout)
    return stats


def test_response_reports_cache_hit_from_memory_and_after_restart_from_ssd(
    single: RunningLockstep, tmp_path: Path
) -> None:
    """The second answer reuses the prefix from memory; after a restart, the prefix comes from
    SSD."""
    first_text, cached_tokens, _ = _ask(single)
    assert cached_tokens == 0
    second_text, cached_tokens, header = _ask(single)
    assert second_text == first_text
    assert cached_tokens > 512
    assert f"memory={cached_tokens}" in header
    stats = _wait_for_stored_records(single)
    assert stats["on"]
    listed = json.loads(_cache(single, "list", "--json").stdout)
    assert sum(folder["records"] for folder in listed["folders"]) == stats["records"]
    single.interrupt()
    assert single.wait() == 0

    with running_lockstep(tmp_path) as restarted:
        text, cached_tokens, header = _ask(restarted)
        assert text == first_text
        assert cached_tokens >= 512
        assert f"ssd={cached_tokens}" in header
        assert _cache(restarted, "check").returncode == 0
        assert _cache(restarted, "clear").returncode == 0
        assert _cache_stats(restarted)["records"] == 0


@pytest.mark.proof
def test_requests_succeed_while_killed_cache_store_restarts(single: RunningLockstep) -> None:
    """Without a store, answers use blocks in memory; a restarted store accepts blocks again."""
    first_text, _, _ = _ask(single)
    _wait_for_stored_records(single)
    pid = single.children()["cache-store"]
    os.kill(pid, signal.SIGKILL)

    assert _ask(single)[0] == first_text
    wait_until(lambda: single.children().get("cache-store") not in (None, pid), 30.0, poll_s=0.1)
    records_before = _wait_for_stored_records(single)["records"]
    other = {**QUESTION, "messages": [{"role": "user", "content": LONG_TEXT[::-1]}]}
    _ask(single, other)

    def spills_again() -> bool:
        if _cache_stats(single)["records"] > records_before:
            return True
        # Ranks use a store that failed only after some seconds: give them another prompt.
        other["messages"][0]["content"] += "!"
        _ask(single, other)
        return False

    wait_until(spills_again, 40.0, poll_s=0.0, failure=lambda: single.text)


@pytest.mark.proof
def test_request_with_other_cache_salt_finds_no_cached_prefix(single: RunningLockstep) -> None:
    """A request with another salt gets no block of a prefix that was just computed."""
    _ask(single, {**QUESTION, "cache_salt": "mine"})

    assert _ask(single, {**QUESTION, "cache_salt": "theirs"})[1] == 0
    assert _ask(single, {**QUESTION, "cache_salt": "mine"})[1] > 512
