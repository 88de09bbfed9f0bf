"""Loaded spare processes under a real `lockstep up`: they continue streams without loading."""

import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.running_lockstep import RunningLockstep, StreamReader, running_lockstep
from tests.support.ports import free_port
from tests.support.process_table import wait_until_ended
from tests.support.waiting import wait_until

LONG: dict[str, Any] = {
    "model": "lockstep-demo",
    "prompt": "one two three",
    "temperature": 1.0,
    "seed": 5,
    "max_tokens": 300,
}
LOADED_S = 60.0
"""Spares start seconds after the world is ready, and load beside its streams."""


@pytest.fixture(autouse=True)
def _with_loaded_spares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_RANK_WORKER_SPARE", "loaded")


def _wait_until_loaded(running: RunningLockstep) -> dict[str, int]:
    """Wait until the spare world has loaded; return its processes by rank."""
    wait_until(lambda: _spare_world(running) == "loaded", LOADED_S, poll_s=0.1)
    return running.spares()


def _spare_world(running: RunningLockstep) -> str:
    url = f"http://127.0.0.1:{running.port}/v1/lockstep/status"
    with urllib.request.urlopen(url, timeout=10.0) as answer:
        return str(json.load(answer)["scheduler"]["spare_world"])


@pytest.mark.parametrize(
    ("ranks", "has_hostfile"),
    [
        pytest.param(1, False, id="1"),
        pytest.param(2, False, id="2", marks=pytest.mark.proof),
        pytest.param(2, True, id="hostfile", marks=pytest.mark.proof),
    ],
)
def test_loaded_spares_continue_stream_with_same_tokens_when_rank_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, has_hostfile: bool
) -> None:
    """After SIGKILL of a rank in the middle of a stream all ranks continue in their spares, the
    text is that of an undisturbed run, and other spares load. This holds for ranks at fixed
    ports too, which both worlds use."""
    if has_hostfile:
        hostfile = tmp_path / "hosts.json"
        hostfile.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(ranks)]))
        monkeypatch.setenv("LOCKSTEP_WORLD_HOSTFILE", str(hostfile))
    with running_lockstep(tmp_path, ranks) as running:
        expected = StreamReader(running.stream("/v1/completions", LONG)).text()
        before, spares = running.children(), _wait_until_loaded(running)
        reader = StreamReader(running.stream("/v1/completions", LONG))

        os.kill(before[f"rank-worker {ranks - 1}"], signal.SIGKILL)

        assert reader.text() == expected
        wait_until(lambda: {rank: running.children().get(rank) for rank in spares} == spares, 30.0)
        successors = _wait_until_loaded(running)
        assert len(successors) == ranks
        assert not set(successors.values()) & {*spares.values(), *before.values()}


@pytest.mark.proof
def test_killed_spare_disturbs_no_stream_and_another_one_loads(tmp_path: Path) -> None:
    """The death of a loaded spare is no end of an epoch: the ranks keep their processes."""
    with running_lockstep(tmp_path) as running:
        before, spares = running.children(), _wait_until_loaded(running)
        reader = StreamReader(running.stream("/v1/completions", LONG))

        os.kill(spares["rank-worker 0"], signal.SIGKILL)
        wait_until_ended(spares.values(), 10.0)

        assert reader.text()
        wait_until(lambda: running.spares() not in ({}, spares), LOADED_S, poll_s=0.1)
        _wait_until_loaded(running)
        assert running.children() == before


@pytest.mark.proof
def test_loaded_spare_continues_for_stopped_rank_which_is_killed(tmp_path: Path) -> None:
    """A rank that is stopped by SIGSTOP is told to leave and killed, and its spare serves."""
    with running_lockstep(tmp_path) as running:
        expected = StreamReader(running.stream("/v1/completions", LONG)).text()
        stopped = running.children()["rank-worker 0"]
        (spare,) = _wait_until_loaded(running).values()
        reader = StreamReader(running.stream("/v1/completions", LONG))

        os.kill(stopped, signal.SIGSTOP)

        assert reader.text() == expected
        wait_until_ended([stopped], 10.0)
        wait_until(lambda: running.children().get("rank-worker 0") == spare, 30.0)


@pytest.mark.proof
def test_no_loaded_spare_outlives_killed_supervisor(tmp_path: Path) -> None:
    """Loaded spares end with `lockstep up`, however it ends."""
    with running_lockstep(tmp_path) as running:
        pids = [*_wait_until_loaded(running).values(), *running.children().values()]

        running.process.kill()
        running.process.wait(10.0)

        wait_until_ended(pids, 10.0)
