"""Writing to somebody who does not read: nobody waits, and what is missing is said."""

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

DEADLINE_S = 30.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, NonBlockingStream]]:
    """A pipe's read end, and a stream over its other end."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", encoding="utf-8") as stream:
        yield reading, NonBlockingStream(stream)
    os.close(reading)


def _read(descriptor: int) -> str:
    """Return what lies in the pipe."""
    os.set_blocking(descriptor, False)
    found = b""
    try:
        while part := os.read(descriptor, 65_536):
            found += part
    except BlockingIOError:
        pass
    return found.decode()


def _does_not_wait(deed: object) -> None:
    assert callable(deed)
    thread = threading.Thread(target=deed, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_who_is_read_says_everything_in_order(pipe: tuple[int, NonBlockingStream]) -> None:
    """Also what is longer than a pipe takes at once, and letters of several bytes."""
    reading, stream = pipe
    lines = [f"{number} {'é' * number}\n" for number in range(300)]
    console = Console(stream)
    found = ""

    for line in lines:
        console.print_line(line.rstrip("\n"))
        found += _read(reading)
    console.flush(DEADLINE_S)

    assert found + _read(reading) == "".join(lines)


def test_nobody_waits_for_who_does_not_read(pipe: tuple[int, NonBlockingStream]) -> None:
    """The pipe is full and so is what is kept: the rest is dropped, and said when it is read."""
    reading, stream = pipe
    console = Console(stream)
    line = "x" * 999
    count = 3 * UNREAD_BYTES_MAX // 1_000

    def say_much() -> None:
        for _ in range(count):
            console.log_line("rank 0", line)
        console.flush(0.1)

    _does_not_wait(say_much)
    found = ""
    while part := _read(reading):
        found += part
        console.flush()
    console.print_line("there again")
    found += _read(reading)

    kept = found.count(line)
    assert UNREAD_BYTES_MAX // 1_100 < kept < count
    assert f"({count - kept:,} lines dropped here" in found
    assert found.endswith("there again\n")
    assert found.index("dropped") > found.rindex(line)


def test_the_last_words_wait_for_their_reader(pipe: tuple[int, NonBlockingStream]) -> None:
    """At the end there is a moment for a reader that is merely slow."""
    reading, stream = pipe
    console = Console(stream)
    for _ in range(200):
        console.print_line("x" * 999)
    console.print_line("the end")
    found: list[str] = []

    def read_slowly() -> None:
        until_s = time.monotonic() + DEADLINE_S
        while not "".join(found).endswith("the end\n") and time.monotonic() < until_s:
            time.sleep(0.05)
            found.append(_read(reading))

    reader = threading.Thread(target=read_slowly)
    reader.start()
    console.flush(DEADLINE_S)
    reader.join()

    assert "".join(found).endswith("the end\n")


def test_a_reader_that_has_gone_is_not_missed() -> None:
    """`| head`: what is said is lost, nothing piles up and nothing is raised."""
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


def test_a_full_disk_is_survived() -> None:
    """Lines are lost while there is no room. Linux has a device that is always full."""
    device = Path("/dev/full") if Path("/dev/full").exists() else Path(os.devnull)
    with device.open("w", encoding="utf-8") as stream:
        console = Console(non_blocking(stream))
        for _ in range(3):
            console.print_line("x" * UNREAD_BYTES_MAX)
