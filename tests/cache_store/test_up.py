"""`lockstep up` with a cache store: start, restart, stop, and failure."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.running_lockstep import RunningLockstep
from tests.support.waiting import wait_until

StartUp = Callable[..., RunningLockstep]


@pytest.fixture
def up(home: Path) -> Iterator[StartUp]:
    """Start `lockstep up` on the demo model with these cache settings."""
    started: list[RunningLockstep] = []

    def start(**cache: str) -> RunningLockstep:
        run_dir = home / "run"
        run_dir.mkdir(mode=0o700, exist_ok=True)
        config = home / "my.toml"
        lines = [f"{key} = {value}" for key, value in cache.items()]
        config.write_text("\n".join(["[cache]", *lines]))
        started.append(RunningLockstep(run_dir, 1, "--config", str(config)))
        return started[-1]

    yield start
    for running in started:
        running.close()


def _answers(running: RunningLockstep) -> bool:
    body = {"model": "lockstep-demo", "prompt": "one two three", "max_tokens": 4}
    return bool(running.post("/v1/completions", body)["choices"])


def _wait_for_starts(running: RunningLockstep, count: int) -> None:
    wait_until(lambda: running.text.count("store_on") >= count, 30.0, poll_s=0.05)


def test_lockstep_up_starts_cache_store_and_restarts_it_when_killed(
    up: StartUp, home: Path
) -> None:
    """The store is started with the rest, restarted when it is killed, and stopped after the
    ranks."""
    running = up()
    running.wait_until_ready()
    pid = running.children()["cache-store"]
    assert (home / "run" / "blocks" / "lockstep.lock").read_text().startswith(f"{pid}\n")

    os.kill(pid, signal.SIGKILL)
    running.wait_for_line("store exited with signal 9")
    assert _answers(running)
    wait_until(lambda: running.children().get("cache-store", pid) != pid, 30.0, poll_s=0.05)
    assert _answers(running)
    _wait_for_starts(running, 2)

    running.interrupt()
    assert running.wait() == 0


@pytest.mark.proof
def test_repeatedly_killed_cache_store_is_restarted_without_delay(up: StartUp) -> None:
    """A store that served before it was killed is restarted at once, however often it is killed."""
    running = up()
    running.wait_until_ready()

    for kill in range(1, 6):
        _wait_for_starts(running, kill)
        # The supervisor reconnects within a second and then queries the store's state. A stalled
        # machine takes longer.
        time.sleep(4.0)
        os.kill(running.children()["cache-store"], signal.SIGKILL)
        line = running.wait_for_line("store exited with signal 9")

        assert float(line.rpartition(" in ")[2].removesuffix(" s")) <= 0.2, line


def test_lockstep_answers_requests_when_cache_directory_is_unusable(
    up: StartUp, home: Path
) -> None:
    """A store that cannot run is reported once, and requests are answered."""
    (home / "run").mkdir(mode=0o700)
    (home / "run" / "blocks").write_text("mine")

    running = up()
    running.wait_until_ready()

    assert _answers(running)
    time.sleep(1.0)
    assert running.text.count("store cannot run with this configuration (code 78") == 1
    assert "serving continues without blocks on SSD" in running.text
    assert "cache-store" not in running.children()
    running.interrupt()
    assert running.wait() == 0
    assert (home / "run" / "blocks").read_text() == "mine"


def test_lockstep_up_starts_no_cache_store_when_ssd_is_off(up: StartUp, home: Path) -> None:
    """With `cache.ssd` off there is no store process and no directory."""
    running = up(ssd="false")
    running.wait_until_ready()

    assert "cache-store" not in running.children()
    assert _answers(running)
    running.interrupt()
    assert running.wait() == 0
    assert not (home / "run" / "blocks").exists()
