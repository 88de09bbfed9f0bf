"""One child, with a real process: stopped, struck, given up, started again."""

import io
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.supervisor.children.child import (
    FIRST_DELAY_S,
    HEALTHY_AFTER_S,
    LINE_CHARS_MAX,
    LONGEST_DELAY_S,
    Backoff,
    Child,
    Role,
)
from services.supervisor.console.console import Console
from shared import limits
from shared.configuration.loading import API_KEYS_VARIABLE

DEADLINE_S = 30.0


@pytest.fixture
def said() -> io.StringIO:
    """What the console has written."""
    return io.StringIO()


@pytest.fixture
def child(tmp_path: Path, said: io.StringIO) -> Iterator[Child]:
    """A scheduler, which starts fast and waits for ranks for ever."""
    config_file = tmp_path / "config.toml"
    config_file.write_text(f'[paths]\nrun_dir = "{tmp_path}"\n')
    environment = {name: text for name, text in os.environ.items() if name != API_KEYS_VARIABLE}
    child = Child(Role("scheduler", ("scheduler",)), config_file, environment, Console(said))
    yield child
    child.kill()


def _until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def _pid(child: Child) -> int | None:
    return child.pid


def _open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def _next_descriptor() -> int:
    """Return the number that the next open file would have: the lowest that is free."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


def _kill(child: Child) -> None:
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)


def test_a_stopped_process_is_noticed(child: Child) -> None:
    """SIGSTOP is seen by the parent alone; time counts from there, and ends with SIGCONT."""
    child.start_if_due(0.0)
    pid = child.pid
    assert pid is not None
    assert child.reap(1.0) is None
    assert child.stopped_s(9.0) == 0.0

    os.kill(pid, signal.SIGSTOP)
    _until(lambda: child.reap(10.0) is None and child.stopped_s(11.0) > 0.0)
    assert child.stopped_s(25.0) == 15.0

    os.kill(pid, signal.SIGCONT)
    _until(lambda: child.reap(26.0) is None and child.stopped_s(27.0) == 0.0)
    assert child.pid == pid


def test_a_stopped_process_that_is_struck_comes_back(child: Child, said: io.StringIO) -> None:
    """SIGKILL reaches a stopped process too; why is said once, and another one starts."""
    child.start_if_due(0.0)
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)

    for _ in range(3):
        child.kill_stuck("does not leave")
    _until(lambda: child.reap(5.0) == -signal.SIGKILL)

    assert said.getvalue().count("scheduler does not leave: killing it") == 1
    assert _pid(child) is None
    assert child.stopped_s(6.0) == 0.0
    child.start_if_due(6.0)
    assert _pid(child) not in (None, first)
    assert child.starts == 2


def test_a_process_that_has_served_is_started_at_once(child: Child) -> None:
    """Killed again and again: without having served it waits longer each time, else it does not."""
    child.start_if_due(0.0)
    now_s = 0.0
    for serves, wait_s in ((False, 0.1), (False, 0.2), (False, 0.4), (True, 0.1), (True, 0.1)):
        if serves:
            child.reset_backoff()
        _kill(child)
        now_s += 10.0
        _until(lambda: child.reap(now_s) is not None)  # noqa: B023 - called at once

        child.start_if_due(now_s + wait_s - 0.01)
        assert _pid(child) is None
        child.start_if_due(now_s + wait_s + 0.01)
        assert _pid(child) is not None


def test_whoever_is_given_up_stays_away(child: Child) -> None:
    """A role that nobody needs and that cannot run is not started any more."""
    child.start_if_due(0.0)
    child.kill_stuck("is in the way")
    _until(lambda: child.reap(1.0) is not None)

    child.disable_restart()
    child.start_if_due(1e9)

    assert child.pid is None
    assert child.has_ended(1e9)


def test_what_cannot_be_started_is_tried_again(
    child: Child, said: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptors left, or an interpreter that is being replaced: no end of everything."""
    open_before = _open_files()
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    now_s = 0.0
    with monkeypatch.context() as broken:
        broken.setattr(child, "_command", ["/no/such/python"])
        for wait_s in (0.1, 0.2, 0.4):
            child.start_if_due(now_s)
            assert child.pid is None
            child.start_if_due(now_s + wait_s - 0.01)
            now_s += wait_s
        assert said.getvalue().count("cannot start scheduler (No such file") == 3
        assert _open_files() == open_before
    resource.setrlimit(resource.RLIMIT_NOFILE, (_next_descriptor(), allowed[1]))
    try:
        child.start_if_due(now_s)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    assert "cannot start scheduler (Too many open files); retrying in 0.8 s" in (said.getvalue())
    assert child.starts == 0

    child.start_if_due(now_s + 0.8)

    assert _pid(child) is not None
    assert child.starts == 1


def test_a_line_without_an_end_is_taken_in_pieces(
    child: Child, said: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is neither held in memory as a whole nor left in the pipe, where it would stop the child.

    What comes after it is shown too.
    """
    length = 5 * LINE_CHARS_MAX // 2
    program = f"print('x' * {length}); print('after it')"
    monkeypatch.setattr(child, "_command", [sys.executable, "-c", program])

    child.start_if_due(0.0)
    # The end of a process is not put off for long until its log has been read.
    _until(lambda: "| after it" in said.getvalue())
    _until(lambda: child.reap(1.0) is not None)

    lines = said.getvalue().splitlines()
    assert max(map(len, lines)) < LINE_CHARS_MAX + 100
    assert sum(line.count("x") for line in lines if "exited" not in line) == length
    assert any(line.endswith("| after it") for line in lines)


def test_its_end_is_known(child: Child, tmp_path: Path) -> None:
    """The exit code of the process that ended last is kept: 0 after a clean end."""
    child.start_if_due(0.0)
    pid = child.pid
    assert pid is not None
    _until((tmp_path / "gateways.sock").exists)
    time.sleep(0.2)

    child.terminate()
    _until(lambda: child.has_ended(1.0))

    assert child.last_code == limits.EXIT_OK


def test_waits_double_up_to_a_bound() -> None:
    """0.1 s, doubling, never more than 10 s."""
    backoff = Backoff()

    waits_s = [backoff.after(ran_for_s=1.0) for _ in range(9)]

    assert waits_s == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert (waits_s[0], waits_s[-1]) == (FIRST_DELAY_S, LONGEST_DELAY_S)


def test_a_healthy_life_is_rewarded() -> None:
    """A process that lived for a minute comes back at once when it exits."""
    backoff = Backoff()
    for _ in range(5):
        backoff.after(ran_for_s=0.5)

    assert backoff.after(ran_for_s=HEALTHY_AFTER_S) == FIRST_DELAY_S
    assert backoff.after(ran_for_s=0.5) == 2 * FIRST_DELAY_S


def test_whoever_has_served_comes_back_at_once() -> None:
    """A hundred short lives that each reached readiness: the wait never grows."""
    backoff = Backoff()

    waits_s = set()
    for _ in range(100):
        backoff.reset_backoff()
        waits_s.add(backoff.after(ran_for_s=3.0))

    assert waits_s == {FIRST_DELAY_S}


def test_being_told_to_end_is_no_fault() -> None:
    """A rank that ended with its world waits no longer, and no shorter, than it would have."""
    backoff = Backoff()
    backoff.after(ran_for_s=1.0)

    waits_s = [backoff.after(ran_for_s=1.0, is_own_fault=False) for _ in range(5)]

    assert waits_s == [2 * FIRST_DELAY_S] * 5
    assert backoff.after(ran_for_s=1.0) == 2 * FIRST_DELAY_S
    assert backoff.after(ran_for_s=1.0) == 4 * FIRST_DELAY_S
