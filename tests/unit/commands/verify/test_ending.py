"""The end of a service, and who is asked for it: only a supervisor that lives."""

import fcntl
import os
import socket
from pathlib import Path

import pytest

from services.commands.verify import ending, fast_synch_check
from services.commands.verify.judging import TimedCheck
from shared.configuration.loading import config_from_tree
from shared.os import fast_synch
from tests.unit.commands.verify.recorded import rank


def test_a_supervisor_is_known_by_its_lock(tmp_path: Path) -> None:
    """The process that holds it; a file that stayed behind is nobody's."""
    assert ending.supervisor_pid(tmp_path) is None
    (tmp_path / "lock").write_text("4711\n")
    assert ending.supervisor_pid(tmp_path) is None
    held = os.open(tmp_path / "lock", os.O_RDWR)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert ending.supervisor_pid(tmp_path) == 4711
    finally:
        os.close(held)


def test_without_a_supervisor_nothing_is_ended(tmp_path: Path) -> None:
    """launchd's processes are left alone: SKIP, with who stops them."""
    line = ending.shut_down(config_from_tree({"paths": {"run_dir": str(tmp_path)}}))
    assert (line.verdict, "launchd" in line.detail) == ("SKIP", True)


@pytest.mark.parametrize(
    ("seconds", "left", "verdict"),
    [(0.4, [], "PASS"), (5.1, [], "FAIL"), (0.4, ["rank"], "FAIL"), (60.0, ["store"], "FAIL")],
)
def test_an_end_is_clean_within_five_seconds(seconds: float, left: list[str], verdict: str) -> None:
    """And when nobody is left."""
    line = ending.judge_shutdown(seconds, left)
    assert line.verdict == verdict
    assert bool(line.remedy) is (verdict == "FAIL")


def _trial(setting: fast_synch_check.Setting, path: Path, system: str = "darwin") -> TimedCheck:
    host = socket.gethostname()
    ranks = [rank(0, host=host), rank(1, host="elsewhere")]
    return fast_synch_check.judge_fast_synch(setting, ranks, host, path, system)


def test_fast_synchronization_needs_a_start_that_tried_it(tmp_path: Path) -> None:
    """Without the setting there is nothing to prove; with it, the rank's note is the proof."""
    path = tmp_path / fast_synch.FILE_NAME
    tried = _trial("auto", path)
    assert (tried.verdict, "METAL_FAST_SYNCH=on" in tried.remedy) == ("FAIL", True)
    assert _trial("on", path).verdict == "FAIL"
    kind, _, name = rank(0).device.partition(" ")
    fast_synch.record_proof(path, fast_synch.platform_build(kind, name, "darwin"))
    assert _trial("on", path).verdict == "PASS"


def test_fast_synchronization_is_metals(tmp_path: Path) -> None:
    """On Linux there is none, so nothing is claimed."""
    assert _trial("on", tmp_path / "file", "linux").verdict == "SKIP"
