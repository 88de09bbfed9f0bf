"""Spare processes of ranks under a real `lockstep up`: takeover, end and change of settings."""

import contextlib
import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from services.commands import main
from shared import limits
from tests.end_to_end.running_lockstep import RunningLockstep, StreamReader, running_lockstep
from tests.support.process_table import is_running, wait_until_ended
from tests.support.waiting import wait_until

LONG: dict[str, Any] = {
    "model": "lockstep-demo",
    "prompt": "one two three",
    "temperature": 1.0,
    "seed": 5,
    "max_tokens": 300,
}
SPARES_S = 60.0
"""A spare starts seconds after the world is ready, at a low priority."""
END_DEADLINE_S = 10.0

pytestmark = pytest.mark.proof


@pytest.fixture(autouse=True)
def _with_spares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_RANK_WORKER_SPARE", "started")


def _wait_for_spares(running: RunningLockstep, count: int) -> dict[str, int]:
    wait_until(lambda: len(running.spares()) == count, SPARES_S, poll_s=0.1)
    return running.spares()


def test_spare_takes_place_of_killed_rank_and_stream_continues_with_same_tokens(
    tmp_path: Path,
) -> None:
    """After SIGKILL of a rank in the middle of a stream both ranks continue in their spares, the
    text is that of an undisturbed run, and new spares start."""
    with running_lockstep(tmp_path, 2) as running:
        expected = StreamReader(running.stream("/v1/completions", LONG)).text()
        ranks, spares = running.children(), _wait_for_spares(running, 2)
        reader = StreamReader(running.stream("/v1/completions", LONG))

        os.kill(ranks["rank-worker 1"], signal.SIGKILL)

        assert reader.text() == expected
        running.wait_for_line("ready again")
        after = running.children()
        assert after.keys() == ranks.keys()
        assert {rank: after[rank] for rank in spares} == spares
        successors = _wait_for_spares(running, 2)
        assert not set(successors.values()) & set(after.values())


def test_no_spare_outlives_stopped_or_killed_supervisor(tmp_path: Path) -> None:
    """After Ctrl-C as after SIGKILL of the supervisor, its spare ends with the other processes."""
    for number in (signal.SIGINT, signal.SIGKILL):
        folder = tmp_path / number.name
        folder.mkdir(mode=0o700)
        with running_lockstep(folder) as running:
            pids = [*_wait_for_spares(running, 1).values(), *running.children().values()]

            running.process.send_signal(number)
            running.process.wait(SPARES_S)

            wait_until_ended(pids, END_DEADLINE_S)


def test_spare_with_earlier_settings_is_ended_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lockstep restart world` ends the spare; those that start later have the new settings and
    take the places of ranks of the new world."""
    monkeypatch.setenv("LOCKSTEP_PATHS_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("LOCKSTEP_CACHE_DIRECTORY", str(tmp_path / "blocks"))
    with running_lockstep(tmp_path) as running:
        (old,) = _wait_for_spares(running, 1).values()

        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = main.main(["restart", "world", "--ranks", "2"])

        assert code == limits.EXIT_OK, output.getvalue()
        assert not is_running(old)
        new = _wait_for_spares(running, 2)
        assert old not in {*new.values(), *running.children().values()}
        ranks = running.children()
        os.kill(ranks["rank-worker 0"], signal.SIGKILL)
        wait_until(lambda: running.children().get("rank-worker 0") == new["rank-worker 0"], 30.0)
        running.wait_for_line("ready again")


def test_rank_without_spare_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `rank_worker.spare` off no spare starts, and a killed rank gets a new process."""
    monkeypatch.setenv("LOCKSTEP_RANK_WORKER_SPARE", "off")
    with running_lockstep(tmp_path) as running:
        before = running.children()["rank-worker 0"]

        os.kill(before, signal.SIGKILL)
        running.wait_for_line("ready again")

        assert running.children()["rank-worker 0"] != before
        assert not running.spares()
