"""`lockstep restart world`: another number of ranks for a Lockstep that runs."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.commands import main
from shared import limits
from tests.end_to_end.running_lockstep import RunningLockstep, StreamReader, running_lockstep
from tests.support.waiting import wait_until

PROMPT: dict[str, Any] = {
    "model": "lockstep-demo",
    "prompt": "one two three four five six seven " * 60,
    "temperature": 0,
    "max_tokens": 8,
}
LONG: dict[str, Any] = {**PROMPT, "prompt": "one two three", "max_tokens": 2_000}
STORED_S = 30.0


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningLockstep]:
    """One rank; commands of this process find it by the run folder."""
    monkeypatch.setenv("LOCKSTEP_PATHS_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("LOCKSTEP_CACHE_DIRECTORY", str(tmp_path / "blocks"))
    settings = "[cache]\nblock_tokens = 64\n[scheduler]\ndrain_s = 5.0\n"
    with running_lockstep(tmp_path, settings=settings) as running:
        yield running


def _run(*words: str) -> tuple[int, str]:
    """Run a command in this process; return its exit code and its output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main.main(words)
    return code, output.getvalue()


def _answer(running: RunningLockstep) -> tuple[str, int]:
    """Return the text that follows the prompt, and how many of its tokens were cached."""
    body = running.post("/v1/completions", PROMPT)
    cached: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return str(body["choices"][0]["text"]), cached


@pytest.mark.proof
def test_world_restart_changes_number_of_ranks_and_reports_blocks_that_serve(
    running: RunningLockstep,
) -> None:
    """Blocks of one rank do not serve two, and serve again when one rank returns; one process of
    `lockstep up` runs all the time."""
    text, cached = _answer(running)
    assert cached == 0
    wait_until(lambda: "12 " in _run("cache", "list")[1], STORED_S)

    code, out = _run("restart", "world", "--ranks", "2")

    assert code == limits.EXIT_OK, out
    assert "The world is ready: 2 ranks, split by tensor (ring)." in out
    assert "The world has changed since the last start: 2 ranks instead of 1." in out
    assert "0 blocks (0 B) serve this world; 12 blocks (" in out
    assert {"rank-worker 0", "rank-worker 1"} <= running.children().keys()
    _, status = _run("status")
    assert "  change       The world has changed since the last start: 2 ranks" in status
    assert "12 blocks (" in status
    assert _answer(running) == (text, 0)

    code, out = _run("restart", "world", "--ranks", "1")

    assert code == limits.EXIT_OK, out
    assert "1 rank instead of 2" in out
    assert "On this host's SSD 12 blocks (" in out
    assert "rank-worker 1" not in running.children()
    again, cached = _answer(running)
    assert (again, cached > 700) == (text, True)
    assert running.process.poll() is None


@pytest.mark.proof
def test_world_restart_with_open_stream_changes_nothing_after_its_wait(
    running: RunningLockstep,
) -> None:
    """The stream ends as if nothing had been ordered, and new requests are accepted again."""
    expected = StreamReader(running.stream("/v1/completions", LONG)).text()
    before = running.children()
    stream = StreamReader(running.stream("/v1/completions", LONG))

    code, out = _run("restart", "world", "--ranks", "2", "--wait", "0.1")

    assert code == limits.EXIT_UNAVAILABLE
    assert "Requests are still open after 0.1 s, so nothing was changed" in out
    assert _answer(running)[0]
    assert stream.text() == expected
    assert running.children() == before


@pytest.mark.proof
def test_settings_that_ranks_refuse_bring_the_previous_world_back(
    running: RunningLockstep, tmp_path: Path
) -> None:
    """A fault that shows only in the running scheduler is named, and the old settings return."""
    text, _ = _answer(running)
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(
        f"[gateway]\nport = {running.port}\n[model]\ncontext_tokens_max = 128\n"
        "[cache]\nblock_tokens = 256\n"
    )

    code, out = _run("restart", "world", "--config", str(wrong))

    assert code == limits.EXIT_UNAVAILABLE
    assert "The new settings cannot be used, so the previous ones are in use again: " in out
    assert "cache.block_tokens" in out
    wait_until(lambda: _is_ready(running), STORED_S)
    assert _answer(running)[0] == text


def test_wrong_world_is_refused_before_anything_changes(running: RunningLockstep) -> None:
    """A split that the model does not allow, and contradicting settings, restart no process."""
    before = running.children()

    impossible = _run("restart", "world", "--ranks", "7")
    contradicting = _run("restart", "world", "--distributed-mode", "jaccl", "--ranks", "2")

    assert impossible[0] == contradicting[0] == limits.EXIT_CONFIG
    assert "cannot be split over 7 ranks" in impossible[1]
    assert "--distributed-ibv-devices" in contradicting[1]
    assert running.children() == before
    assert _answer(running)[0]


def _is_ready(running: RunningLockstep) -> bool:
    try:
        return running.readiness() == 200
    except OSError:
        return False
