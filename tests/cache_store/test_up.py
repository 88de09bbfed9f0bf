"""`lockstep up` with a cache store: started with the rest, stopped last, and never missed."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.running_lockstep import RunningLockstep

Up = Callable[..., RunningLockstep]


@pytest.fixture
def up(home: Path) -> Iterator[Up]:
    """Start Lockstep on the demo model with settings for its cache."""
    started: list[RunningLockstep] = []

    def start(**cache: str) -> RunningLockstep:
        run_dir = home / "run"
        run_dir.mkdir(exist_ok=True)
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


def test_the_store_is_part_of_it(up: Up, home: Path) -> None:
    """It is started, started again when it is killed, and stopped after the ranks."""
    running = up()
    running.wait_until_ready()
    pid = running.children()["cache-store"]
    assert (home / "run" / "blocks" / "lockstep.lock").read_text().startswith(f"{pid}\n")

    os.kill(pid, signal.SIGKILL)
    running.wait_for_line("store exited with signal 9")
    assert _answers(running)
    until_s = time.monotonic() + 30.0
    while running.children().get("cache-store", pid) == pid:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    assert _answers(running)
    while running.text.count("store_on") < 2:
        assert time.monotonic() < until_s
        time.sleep(0.05)

    running.interrupt()
    assert running.wait() == 0


@pytest.mark.proof
def test_a_store_that_serves_is_started_again_at_once(up: Up) -> None:
    """However often it is killed: it never waits the ten seconds of one that cannot live."""
    running = up()
    running.wait_until_ready()

    for kill in range(1, 6):
        until_s = time.monotonic() + 30.0
        while running.text.count("store_on") < kill:
            assert time.monotonic() < until_s
            time.sleep(0.05)
        # A lost link is noticed and dialled anew within a second, and then it is asked how it is. A
        # machine that stalls takes longer.
        time.sleep(4.0)
        os.kill(running.children()["cache-store"], signal.SIGKILL)
        line = running.wait_for_line("store exited with signal 9")

        assert float(line.rpartition(" in ")[2].removesuffix(" s")) <= 0.2, line


def test_without_a_usable_directory(up: Up, home: Path) -> None:
    """A store that cannot live stops nobody: said once, and requests are answered."""
    (home / "run").mkdir()
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


def test_switched_off(up: Up, home: Path) -> None:
    """Without cache.ssd there is no store and no directory."""
    running = up(ssd="false")
    running.wait_until_ready()

    assert "cache-store" not in running.children()
    assert _answers(running)
    running.interrupt()
    assert running.wait() == 0
    assert not (home / "run" / "blocks").exists()
