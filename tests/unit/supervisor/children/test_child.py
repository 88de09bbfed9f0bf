"""The life of one child process: stop, kill, restart, backoff."""

import io
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.supervisor.children.child import (
    FIRST_DELAY_S,
    HEALTHY_AFTER_S,
    LONGEST_DELAY_S,
    Backoff,
    Child,
    Role,
)
from services.supervisor.children.effective_config import RunFiles
from services.supervisor.children.started_process import LINE_CHARS_MAX
from services.supervisor.console.console import Console
from shared import limits
from shared.configuration.loading import API_KEYS_VARIABLE, config_from_tree
from tests.support.waiting import wait_until

DEADLINE_S = 30.0


@pytest.fixture
def output() -> io.StringIO:
    """What the console has written."""
    return io.StringIO()


@pytest.fixture
def child(tmp_path: Path, output: io.StringIO) -> Iterator[Child]:
    """A scheduler, which starts quickly and waits for ranks until it is ended."""
    files = RunFiles(config_from_tree({"paths": {"run_dir": str(tmp_path)}}), tmp_path)
    environment = {name: text for name, text in os.environ.items() if name != API_KEYS_VARIABLE}
    child = Child(Role("scheduler", ("scheduler",)), files, environment, Console(output))
    yield child
    child.kill()
    if child.spare is not None:
        child.spare.kill()


def _pid(child: Child) -> int | None:
    return child.pid


def _open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def _next_descriptor() -> int:
    """Return the lowest free descriptor, which the next open file gets."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


def _kill(child: Child) -> None:
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)


def test_supervisor_counts_seconds_while_child_process_is_stopped_by_sigstop(child: Child) -> None:
    """The time counts from the moment that the supervisor sees the stop, and ends with SIGCONT."""
    child.start_if_due(0.0)
    pid = child.pid
    assert pid is not None
    assert child.reap(1.0) is None
    assert child.stopped_s(9.0) == 0.0

    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: child.reap(10.0) is None and child.stopped_s(11.0) > 0.0, DEADLINE_S)
    assert child.stopped_s(25.0) == 15.0

    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: child.reap(26.0) is None and child.stopped_s(27.0) == 0.0, DEADLINE_S)
    assert child.pid == pid


def test_stopped_child_process_is_restarted_after_supervisor_kills_it(
    child: Child, output: io.StringIO
) -> None:
    """SIGKILL ends a stopped process too; the reason is printed once, and another process
    starts."""
    child.start_if_due(0.0)
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)

    for _ in range(3):
        child.kill_stuck("does not leave")
    wait_until(lambda: child.reap(5.0) == -signal.SIGKILL, DEADLINE_S)

    assert output.getvalue().count("scheduler does not leave: killing it") == 1
    assert _pid(child) is None
    assert child.stopped_s(6.0) == 0.0
    child.start_if_due(6.0)
    assert _pid(child) not in (None, first)
    assert child.starts == 2


def test_restart_delay_of_child_doubles_unless_child_was_ready(child: Child) -> None:
    """A child that was killed waits longer each time, unless it was ready before."""
    child.start_if_due(0.0)
    now_s = 0.0
    for serves, wait_s in ((False, 0.1), (False, 0.2), (False, 0.4), (True, 0.1), (True, 0.1)):
        if serves:
            child.reset_backoff()
        _kill(child)
        now_s += 10.0
        wait_until(lambda: child.reap(now_s) is not None, DEADLINE_S)  # noqa: B023 - called at once

        child.start_if_due(now_s + wait_s - 0.01)
        assert _pid(child) is None
        child.start_if_due(now_s + wait_s + 0.01)
        assert _pid(child) is not None


def test_child_process_with_disabled_restart_is_not_started_again(child: Child) -> None:
    """An optional role that cannot run is not started again."""
    child.start_if_due(0.0)
    child.kill_stuck("is in the way")
    wait_until(lambda: child.reap(1.0) is not None, DEADLINE_S)

    child.disable_restart()
    child.start_if_due(1e9)

    assert child.pid is None
    assert child.has_ended(1e9)


def test_failed_start_of_child_process_is_retried_with_growing_delay(
    child: Child, output: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing interpreter or a lack of descriptors does not end the supervisor or leak
    descriptors."""
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
        assert output.getvalue().count("cannot start scheduler (No such file") == 3
        assert _open_files() == open_before
    resource.setrlimit(resource.RLIMIT_NOFILE, (_next_descriptor(), allowed[1]))
    try:
        child.start_if_due(now_s)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    assert "cannot start scheduler (Too many open files); retrying in 0.8 s" in (output.getvalue())
    assert child.starts == 0

    child.start_if_due(now_s + 0.8)

    assert _pid(child) is not None
    assert child.starts == 1


def test_overlong_output_line_of_child_is_logged_in_pieces(
    child: Child, output: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long line is neither held in memory as a whole nor left in the pipe, where it would block
    the child.

    The lines after it are logged too.
    """
    length = 5 * LINE_CHARS_MAX // 2
    program = f"print('x' * {length}); print('after it')"
    monkeypatch.setattr(child, "_command", [sys.executable, "-c", program])

    child.start_if_due(0.0)
    # `reap` waits only briefly for the rest of the log, so the test waits for the log first.
    wait_until(lambda: "| after it" in output.getvalue(), DEADLINE_S)
    wait_until(lambda: child.reap(1.0) is not None, DEADLINE_S)

    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) < LINE_CHARS_MAX + 100
    assert sum(line.count("x") for line in lines if "exited" not in line) == length
    assert any(line.endswith("| after it") for line in lines)


def test_supervisor_records_exit_code_0_of_child_that_ends_at_sigterm(
    child: Child, tmp_path: Path
) -> None:
    """After an end at the request of the supervisor the last exit code is 0."""
    child.start_if_due(0.0)
    pid = child.pid
    assert pid is not None
    wait_until((tmp_path / "gateways.sock").exists, DEADLINE_S)
    time.sleep(0.2)

    child.terminate()
    wait_until(lambda: child.has_ended(1.0), DEADLINE_S)

    assert child.last_code == limits.EXIT_OK


def test_supervisor_says_why_rank_ended_at_its_hard_deadline(
    child: Child, output: io.StringIO
) -> None:
    """A rank that C code ends cannot say a sentence; the supervisor says one for its exit code."""
    child.role = Role("rank 1", ())
    child._command = [sys.executable, "-c", f"raise SystemExit({limits.EXIT_DEADLINE})"]
    child.start_if_due(0.0)
    wait_until(lambda: child.reap(1.0), DEADLINE_S)
    child._console.flush(1.0)

    assert "rank 1 exited with code 1 (joining or loading took too long" in output.getvalue()
    assert "scheduler.init_deadline_s" in output.getvalue()


def test_restart_delay_doubles_from_0_1_s_up_to_10_s() -> None:
    """The delay starts at 0.1 s, doubles, and never exceeds 10 s."""
    backoff = Backoff()

    waits_s = [backoff.after(ran_for_s=1.0) for _ in range(9)]

    assert waits_s == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert (waits_s[0], waits_s[-1]) == (FIRST_DELAY_S, LONGEST_DELAY_S)


def test_restart_delay_resets_after_child_ran_for_a_minute() -> None:
    """A process that ran for a minute restarts after the first delay."""
    backoff = Backoff()
    for _ in range(5):
        backoff.after(ran_for_s=0.5)

    assert backoff.after(ran_for_s=HEALTHY_AFTER_S) == FIRST_DELAY_S
    assert backoff.after(ran_for_s=0.5) == 2 * FIRST_DELAY_S


def test_restart_delay_does_not_grow_when_each_run_became_ready() -> None:
    """After a hundred short runs that each reached readiness, the delay has not grown."""
    backoff = Backoff()

    waits_s = set()
    for _ in range(100):
        backoff.reset_backoff()
        waits_s.add(backoff.after(ran_for_s=3.0))

    assert waits_s == {FIRST_DELAY_S}


def test_restart_delay_is_unchanged_when_rank_ended_on_request() -> None:
    """A rank that ended with its world waits neither longer nor shorter than before."""
    backoff = Backoff()
    backoff.after(ran_for_s=1.0)

    waits_s = [backoff.after(ran_for_s=1.0, is_own_fault=False) for _ in range(5)]

    assert waits_s == [2 * FIRST_DELAY_S] * 5
    assert backoff.after(ran_for_s=1.0) == 2 * FIRST_DELAY_S
    assert backoff.after(ran_for_s=1.0) == 4 * FIRST_DELAY_S


def test_spare_process_takes_place_of_killed_child_at_once(
    child: Child, tmp_path: Path, output: io.StringIO
) -> None:
    """The first restart has no delay, the process is that of the spare, and the spare is free to
    start another one."""
    child.spare = _spare(tmp_path, output)
    child.start_if_due(0.0)
    child.spare.start_if_due(0.0)
    waiting = child.spare.pid
    _kill(child)
    wait_until(lambda: child.reap(1.0) is not None, DEADLINE_S)

    child.start_if_due(1.0)

    assert child.pid == waiting
    assert child.spare.pid is None
    assert f"continues in its spare process {waiting}" in output.getvalue()


def test_stop_of_spare_counts_when_it_has_taken_the_place(
    child: Child, tmp_path: Path, output: io.StringIO
) -> None:
    """The system reports a stop once, and then to the spare: its process is killed in the place of
    a rank as a stopped rank is."""
    child.spare = _spare(tmp_path, output)
    child.start_if_due(0.0)
    child.spare.start_if_due(0.0)
    assert child.spare.pid is not None
    os.kill(child.spare.pid, signal.SIGSTOP)
    spare = child.spare
    wait_until(lambda: not spare.has_ended(2.0) and spare.stopped_s(3.0) > 0.0, DEADLINE_S)
    _kill(child)
    wait_until(lambda: child.reap(4.0) is not None, DEADLINE_S)

    child.start_if_due(4.0)

    assert child.stopped_s(7.0) >= 5.0


def test_spare_waits_for_restart_delay_after_repeated_faults(
    child: Child, tmp_path: Path, output: io.StringIO
) -> None:
    """A process that ends again without having worked is not replaced before its delay is over."""
    child.spare = _spare(tmp_path, output)
    for _ in range(2):
        child.start_if_due(1.0)
        child.spare.start_if_due(1.0)
        _kill(child)
        wait_until(lambda: child.reap(1.0) is not None, DEADLINE_S)

    child.start_if_due(1.0)
    assert child.pid is None

    child.start_if_due(1.0 + LONGEST_DELAY_S)
    assert child.pid is not None


def test_child_starts_new_process_if_its_spare_has_ended(
    child: Child, tmp_path: Path, output: io.StringIO
) -> None:
    """An ended spare process gets no place."""
    child.spare = _spare(tmp_path, output)
    child.spare.start_if_due(0.0)
    ended = child.spare.pid
    _kill(child.spare)
    wait_until(lambda: child.spare is not None and child.spare.has_ended(0.0), DEADLINE_S)

    child.start_if_due(0.0)

    assert child.pid not in (None, ended)


def _spare(folder: Path, output: io.StringIO) -> Child:
    files = RunFiles(config_from_tree({"paths": {"run_dir": str(folder)}}), folder)
    role = Role("spare of rank 0", ("rank-worker", "--rank", "0", "--spare"))
    return Child(role, files, dict(os.environ), Console(output))
