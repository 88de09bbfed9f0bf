"""`lockstep up` whose run folder is deleted, as cleaners of temporary folders do, or unusable."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.os import process_file
from tests.end_to_end.running_lockstep import RunningLockstep, StreamReader, running_lockstep
from tests.support.waiting import wait_until

LONG: dict[str, Any] = {
    "model": "lockstep-demo",
    "prompt": "one two three",
    "temperature": 1.0,
    "seed": 7,
    "max_tokens": 300,
}
RESTORE_DEADLINE_S = 10.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLockstep]:
    """One rank, shared by tests that leave it ready."""
    with running_lockstep(tmp_path_factory.mktemp("cleaned") / "run") as started:
        yield started


@pytest.mark.parametrize(
    "deleted",
    [
        pytest.param("config.toml", marks=pytest.mark.proof),
        pytest.param("ranks.sock", marks=pytest.mark.proof),
        ".",
    ],
)
def test_stream_completes_when_rank_is_killed_after_run_folder_was_cleaned(
    running: RunningLockstep, deleted: str
) -> None:
    """The deleted file or the whole folder is made again, so that the new rank finds the scheduler
    and the stream ends with the same text."""
    expected = StreamReader(running.stream("/v1/completions", LONG)).text()
    reader = StreamReader(running.stream("/v1/completions", LONG))
    folder = running.config_file.parent

    path = folder / deleted
    _delete(path) if path.is_dir() else path.unlink()
    os.kill(running.children()["rank-worker 0"], signal.SIGKILL)

    assert reader.text() == expected
    wait_until(path.exists, RESTORE_DEADLINE_S)
    assert "stopping everything" not in running.text


def test_sockets_and_process_files_are_made_again_when_run_folder_was_deleted(
    running: RunningLockstep,
) -> None:
    """Commands find every process again, the folder is private, and the log says so."""
    folder = running.config_file.parent
    expected = {"supervisor", "gateway", "scheduler", "store", "rank-0"}
    wait_until(
        lambda: _names(folder) == expected, RESTORE_DEADLINE_S, failure=lambda: _names(folder)
    )

    _delete(folder)

    wait_until(
        lambda: _names(folder) == expected, RESTORE_DEADLINE_S, failure=lambda: _names(folder)
    )
    for name in ("gateways.sock", "ranks.sock", "store.sock"):
        wait_until((folder / name).exists, RESTORE_DEADLINE_S, failure=name)
    running.wait_for_line("socket_bound_again")
    assert folder.stat().st_mode & 0o777 == 0o700


def _delete(folder: Path) -> None:
    """Delete a folder of running processes, which may write into it meanwhile."""
    aside = folder.with_name("deleted")
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _names(folder: Path) -> set[str]:
    return {process.name for process in process_file.find_all(folder)}
