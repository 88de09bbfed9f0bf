"""Log files: rotation, reopening, output of libraries, and reading them back."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.configuration.settings import LogConfig
from shared.errors import ConfigError
from shared.log import lines
from shared.log.files import HostLog, LogFile, ProcessLog

SMALL = LogConfig(file_bytes_max=65_536, files_max=3)


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    """Closes the files of a test at its end."""
    with contextlib.ExitStack() as stack:
        yield stack


def _write(file: LogFile, numbers: range) -> None:
    for number in numbers:
        fields = {"number": number, "padding": "x" * 100}
        file.write_line(lines.encode(lines.make("gateway", "counted", fields, time_s=number)))


def _numbers(folder: Path) -> list[int]:
    with contextlib.closing(ProcessLog(folder, "gateway")) as log:
        return [line["number"] for line in log.read_all()]


def test_log_files_are_bounded_in_size_and_number_and_keep_the_newest_lines(
    tmp_path: Path, opened: contextlib.ExitStack
) -> None:
    """Months of lines take at most `files_max` files of `file_bytes_max` bytes."""
    file = opened.enter_context(contextlib.closing(LogFile(tmp_path / "logs", "gateway", SMALL)))

    _write(file, range(3_000))

    found = {path.name: path.stat().st_size for path in (tmp_path / "logs").iterdir()}
    assert set(found) == {"gateway.log", "gateway.log.1", "gateway.log.2"}
    assert max(found.values()) <= SMALL.file_bytes_max
    kept = _numbers(tmp_path / "logs")
    assert kept == list(range(kept[0], 3_000))
    assert len(kept) > 500


def test_single_log_file_begins_again_when_it_is_full(
    tmp_path: Path, opened: contextlib.ExitStack
) -> None:
    """With one file per process the bound holds too."""
    file = opened.enter_context(
        contextlib.closing(
            LogFile(tmp_path, "gateway", LogConfig(file_bytes_max=65_536, files_max=1))
        )
    )

    _write(file, range(3_000))

    assert [path.name for path in tmp_path.iterdir()] == ["gateway.log"]
    assert (tmp_path / "gateway.log").stat().st_size <= 65_536
    assert _numbers(tmp_path)[-1] == 2_999


@pytest.mark.parametrize("is_deleted", [False, True])
def test_log_file_is_made_again_after_something_moved_or_deleted_it(
    tmp_path: Path, opened: contextlib.ExitStack, is_deleted: bool
) -> None:
    """logrotate, newsyslog or a person may take the file away while the process runs."""
    file = opened.enter_context(contextlib.closing(LogFile(tmp_path, "gateway", SMALL)))
    _write(file, range(1))

    path = tmp_path / "gateway.log"
    path.unlink() if is_deleted else path.rename(tmp_path / "taken")
    _write(file, range(1, 2))

    assert _numbers(tmp_path) == [1]


def test_log_file_in_unwritable_place_is_refused_with_a_sentence(tmp_path: Path) -> None:
    """A mistake in log.directory ends the start with the path, the cause and the remedy."""
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"log file .*file/logs/gateway\.log.*log\.directory"):
        LogFile(tmp_path / "file" / "logs", "gateway", SMALL)


def test_log_file_continues_when_the_full_one_cannot_be_renamed(
    tmp_path: Path, opened: contextlib.ExitStack
) -> None:
    """A folder stands where the full file should go: no line is lost."""
    (tmp_path / "gateway.log.1").mkdir()
    (tmp_path / "gateway.log.1" / "in the way").write_text("")
    file = opened.enter_context(
        contextlib.closing(
            LogFile(tmp_path, "gateway", LogConfig(file_bytes_max=65_536, files_max=2))
        )
    )

    _write(file, range(1_000))

    text = (tmp_path / "gateway.log").read_text()
    assert [json.loads(line)["number"] for line in text.splitlines()] == list(range(1_000))


_PROGRAM = """
import os, sys
from pathlib import Path
from shared import log
from shared.configuration.settings import LogConfig

log.set_up("rank-0", LogConfig(), Path(sys.argv[1]))
log.Log("rank_worker").info("loaded", request_id="r1")
os.write(1, b"printed by a C library\\n")
raise RuntimeError("not caught")
"""


def test_log_file_gets_all_other_output_of_the_process_when_there_is_no_terminal(
    tmp_path: Path, opened: contextlib.ExitStack
) -> None:
    """What C code prints and a last traceback stand in the file, and are read as lines."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)], capture_output=True, check=False
    )

    assert (done.stdout, done.stderr) == (b"", b"")
    log = opened.enter_context(contextlib.closing(ProcessLog(tmp_path, "rank-0")))
    found = list(log.read_all())
    assert (found[0]["event"], found[0]["request_id"]) == ("loaded", "r1")
    assert {line["event"] for line in found[1:]} == {lines.OUTPUT}
    assert found[1]["text"] == "printed by a C library"
    assert found[-1]["text"] == "RuntimeError: not caught"
    assert {(line["role"], line["rank"]) for line in found} == {("rank", 0)}
    assert {line["time"] for line in found} == {found[0]["time"]}


def test_followed_log_has_every_line_once_across_rotations(
    tmp_path: Path, opened: contextlib.ExitStack
) -> None:
    """A reader that polls now and then misses no line and repeats none while files are renamed."""
    file = opened.enter_context(contextlib.closing(LogFile(tmp_path, "gateway", SMALL)))
    _write(file, range(50))
    log = opened.enter_context(contextlib.closing(ProcessLog(tmp_path, "gateway")))
    found = [line["number"] for line in log.read_all()]

    # Fewer lines than fill a file pass between two polls.
    for start in range(50, 3_000, 100):
        _write(file, range(start, start + 100))
        found += [line["number"] for line in log.read_new()]

    assert found == list(range(3_050))


def test_incomplete_line_is_read_once_it_is_complete(
    tmp_path: Path, opened: contextlib.ExitStack
) -> None:
    """Half a line, cut inside a character, is no line yet."""
    path = tmp_path / "gateway.log"
    whole = lines.encode(lines.make("gateway", "é" * 5, {})).encode()
    cut = whole.index("é".encode()) + 1
    path.write_bytes(whole[:cut])
    log = opened.enter_context(contextlib.closing(ProcessLog(tmp_path, "gateway")))

    assert list(log.read_all()) == []
    with path.open("ab") as stream:
        stream.write(whole[cut:] + b"\n")
    (line,) = log.read_new()
    assert line["event"] == "é" * 5
    assert list(log.read_new()) == []


def test_follow_finds_processes_that_begin_to_log_later(
    tmp_path: Path, opened: contextlib.ExitStack
) -> None:
    """A role that starts while its folder is followed is followed too."""
    scheduler = opened.enter_context(contextlib.closing(LogFile(tmp_path, "scheduler", SMALL)))
    scheduler.write_line(lines.encode(lines.make("scheduler", "first", {})))
    log = opened.enter_context(contextlib.closing(HostLog(tmp_path)))
    found = log.follow()

    assert next(found)["event"] == "first"
    gateway = opened.enter_context(contextlib.closing(LogFile(tmp_path, "gateway", SMALL)))
    gateway.write_line("no log line")
    assert [line["text"] for line in itertools.islice(found, 1)] == ["no log line"]


def test_log_file_is_readable_for_its_group_only(
    tmp_path: Path, opened: contextlib.ExitStack
) -> None:
    """Logs hold names of tenants: others cannot read them, also if the process has no umask."""
    before = os.umask(0)
    try:
        opened.enter_context(contextlib.closing(LogFile(tmp_path / "logs", "gateway", SMALL)))
    finally:
        os.umask(before)

    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "logs" / "gateway.log").stat().st_mode & 0o777 == 0o640
