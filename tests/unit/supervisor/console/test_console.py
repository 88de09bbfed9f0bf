"""Console output to a reader that is slow, has gone, or does not read."""

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.supervisor.console.console import (
    UNREAD_BYTES_MAX,
    Console,
    NonBlockingStream,
    non_blocking,
)
from shared.configuration.settings import LogConfig
from shared.log import lines
from shared.log.files import LogFile
from tests.support.waiting import wait_until

DEADLINE_S = 30.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, NonBlockingStream]]:
    """The read end of a pipe, and a stream over its write end."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", encoding="utf-8") as stream:
        yield reading, NonBlockingStream(stream)
    os.close(reading)


def _read_available(descriptor: int) -> str:
    """Return the text in the pipe without waiting."""
    os.set_blocking(descriptor, False)
    found = b""
    try:
        while part := os.read(descriptor, 65_536):
            found += part
    except BlockingIOError:
        pass
    return found.decode()


def _assert_returns(function: object) -> None:
    """Call a function in a thread and assert that it returns."""
    assert callable(function)
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_console_writes_all_lines_in_order_to_reader(pipe: tuple[int, NonBlockingStream]) -> None:
    """Lines longer than the pipe and characters of several bytes arrive unchanged."""
    reading, stream = pipe
    lines = [f"{number} {'é' * number}\n" for number in range(300)]
    console = Console(stream)
    found = ""

    for line in lines:
        console.print_line(line.rstrip("\n"))
        found += _read_available(reading)
    console.flush(DEADLINE_S)

    assert found + _read_available(reading) == "".join(lines)


def test_console_drops_and_counts_lines_when_reader_does_not_read(
    pipe: tuple[int, NonBlockingStream],
) -> None:
    """When pipe and buffer are full, lines are dropped; the number of dropped lines is printed
    later."""
    reading, stream = pipe
    console = Console(stream)
    line = "x" * 999
    count = 3 * UNREAD_BYTES_MAX // 1_000

    def log_many_lines() -> None:
        for _ in range(count):
            console.forward_line("rank 0", line)
        console.flush(0.1)

    _assert_returns(log_many_lines)
    found = ""
    while part := _read_available(reading):
        found += part
        console.flush()
    console.print_line("there again")
    found += _read_available(reading)

    kept = found.count(line)
    assert UNREAD_BYTES_MAX // 1_100 < kept < count
    assert f"({count - kept:,} lines dropped here" in found
    assert found.endswith("there again\n")
    assert found.index("dropped") > found.rindex(line)


def test_console_flush_waits_until_slow_reader_has_read_everything(
    pipe: tuple[int, NonBlockingStream],
) -> None:
    """`flush` gives a slow reader time to read everything."""
    reading, stream = pipe
    console = Console(stream)
    for _ in range(200):
        console.print_line("x" * 999)
    console.print_line("the end")
    found: list[str] = []

    def read_slowly() -> None:
        def has_read_all() -> bool:
            found.append(_read_available(reading))
            return "".join(found).endswith("the end\n")

        time.sleep(0.05)
        wait_until(has_read_all, DEADLINE_S, poll_s=0.05)

    reader = threading.Thread(target=read_slowly)
    reader.start()
    console.flush(DEADLINE_S)
    reader.join()

    assert "".join(found).endswith("the end\n")


def test_console_raises_no_error_when_its_pipe_is_closed() -> None:
    """With `| head`, output is lost, and the console neither buffers it nor raises."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", encoding="utf-8") as stream:
        stream_over_pipe = NonBlockingStream(stream)
        console = Console(stream_over_pipe)
        for _ in range(3):
            console.print_line("x" * UNREAD_BYTES_MAX)
            stream_over_pipe.write("x")
            with pytest.raises(BrokenPipeError):
                stream_over_pipe.flush()
        console.flush()


def test_console_raises_no_error_when_disk_is_full() -> None:
    """Lines are lost while the disk is full. Linux has a device that is always full."""
    device = Path("/dev/full") if Path("/dev/full").exists() else Path(os.devnull)
    with device.open("w", encoding="utf-8") as stream:
        console = Console(non_blocking(stream))
        for _ in range(3):
            console.print_line("x" * UNREAD_BYTES_MAX)


def test_console_in_json_makes_one_object_of_every_line_whatever_it_is(
    pipe: tuple[int, NonBlockingStream],
) -> None:
    """A child's log line passes unchanged; its prints, and the supervisor's own lines, become
    objects with the same keys."""
    reading, stream = pipe
    console = Console(stream, as_json=True)
    child = lines.encode(lines.make("rank 1", "loaded", {"epoch": 2, "request_id": "r"}))

    console.forward_line("rank 1", child)
    console.forward_line("rank 1", "[ring] printed by MLX")
    console.forward_line("gateway", '{"not": "a log line"}')
    console.forward_line("gateway", "{broken")
    console.forward_line("store", "")
    console.log_line("rank 1 exited", "warning")
    console.print_line("\nReady\n  curl\n")
    console.show_progress("Loading: 50 %")
    console.show_progress("")

    text = _read_available(reading)
    found = [json.loads(line) for line in text.splitlines()]
    assert text.splitlines()[0] == child
    assert [
        (line["role"], line.get("rank"), line["event"], line.get("text")) for line in found
    ] == [
        ("rank", 1, "loaded", None),
        ("rank", 1, "output", "[ring] printed by MLX"),
        ("gateway", None, "output", '{"not": "a log line"}'),
        ("gateway", None, "output", "{broken"),
        ("store", None, "output", ""),
        ("lockstep", None, "rank 1 exited", None),
        ("lockstep", None, "Ready", None),
        ("lockstep", None, "  curl", None),
        ("lockstep", None, "Loading: 50 %", None),
    ]
    assert all({"time", "level", "host"} <= line.keys() for line in found)


def test_note_about_dropped_lines_is_json_too(pipe: tuple[int, NonBlockingStream]) -> None:
    """A reader of JSON that falls behind gets an object that says how many lines are missing."""
    reading, _ = pipe
    with os.fdopen(os.dup(pipe[1]._descriptor), "w", encoding="utf-8") as stream:
        console = Console(NonBlockingStream(stream, as_json=True), as_json=True)
        for _ in range(3 * UNREAD_BYTES_MAX // 1_000):
            console.forward_line("rank 0", "x" * 1_000)
        text = ""
        for _ in range(2 * UNREAD_BYTES_MAX // 1_000):
            text += _read_available(reading)
            console.flush()
        console.log_line("later")
        console.flush()
        text += _read_available(reading)

    notes = [line for line in map(json.loads, text.splitlines()) if "dropped here" in line["event"]]
    assert [line["role"] for line in notes] == ["lockstep"]


def test_console_shows_log_lines_of_children_as_text_with_every_line_named(
    pipe: tuple[int, NonBlockingStream],
) -> None:
    """People read the level, the event and its fields; each line of a traceback has the role."""
    reading, stream = pipe
    fields = {"detail": "no memory", "traceback": "Traceback:\n  here", "epoch": 2}
    line = lines.make("rank 1", "rank_failed", fields, level="error", time_s=0.0)

    Console(stream).forward_line("rank 1", lines.encode(line))

    clock = time.strftime("%H:%M:%S", time.localtime(0.0))
    assert _read_available(reading).splitlines() == [
        f"rank 1    | {clock} error   rank_failed detail=no memory traceback=Traceback:",
        "rank 1    |   here epoch=2",
    ]


def test_console_keeps_all_lines_in_its_log_file(tmp_path: Path) -> None:
    """The file gets JSON lines of everything, also if standard output is not used."""
    file = LogFile(tmp_path, "lockstep", LogConfig())
    console = Console(None, file=file)

    console.print_line("Starting")
    console.forward_line("rank 0", "printed")
    console.log_line("stopped")
    file.close()

    found = [json.loads(line) for line in (tmp_path / "lockstep.log").read_text().splitlines()]
    assert [line.get("text", line["event"]) for line in found] == ["Starting", "printed", "stopped"]
