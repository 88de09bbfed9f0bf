"""End of a Lockstep that has a supervisor, and the check of fast synchronization."""

import os
import socket
from pathlib import Path

import pytest

from services.commands.verify import ending, fast_synch_check
from services.commands.verify.judging import TimedCheck
from shared.configuration.loading import config_from_tree
from shared.os import fast_synch, process_file
from shared.os.process_file import ProcessFile
from tests.unit.commands.verify.recorded import healthy_rank


def test_verify_finds_supervisor_only_while_it_runs(tmp_path: Path) -> None:
    """The process id counts only while a process holds the file."""
    assert ending.supervisor_pid(tmp_path) is None
    file = ProcessFile(tmp_path, process_file.SUPERVISOR, is_only=True)
    assert ending.supervisor_pid(tmp_path) == os.getpid()
    file.release()
    assert ending.supervisor_pid(tmp_path) is None


def test_verify_skips_shutdown_check_when_no_supervisor_runs(tmp_path: Path) -> None:
    """Processes of launchd are left alone: the verdict is SKIP, and the detail names launchd."""
    line = ending.shut_down(config_from_tree({"paths": {"run_dir": str(tmp_path)}}))
    assert (line.verdict, "launchd" in line.detail) == ("SKIP", True)


@pytest.mark.parametrize(
    ("seconds", "remaining", "verdict"),
    [(0.4, [], "PASS"), (5.1, [], "FAIL"), (0.4, ["rank"], "FAIL"), (60.0, ["store"], "FAIL")],
)
def test_verify_passes_shutdown_within_five_seconds_that_leaves_no_process(
    seconds: float, remaining: list[str], verdict: str
) -> None:
    """A later end, or one that leaves a process, fails."""
    line = ending.judge_shutdown(seconds, remaining)
    assert line.verdict == verdict
    assert bool(line.remedy) is (verdict == "FAIL")


def _judge_fast_synch(
    setting: fast_synch_check.Setting, path: Path, system: str = "darwin"
) -> TimedCheck:
    """Return the check of two ranks, one of them on this host."""
    host = socket.gethostname()
    ranks = [healthy_rank(0, host=host), healthy_rank(1, host="elsewhere")]
    return fast_synch_check.judge_fast_synch(setting, ranks, host, path, system)


def test_verify_fails_metal_fast_synch_until_rank_recorded_start_that_used_it(
    tmp_path: Path,
) -> None:
    """The check fails until a rank has recorded a start that used the setting."""
    path = tmp_path / fast_synch.FILE_NAME
    unproven = _judge_fast_synch("auto", path)
    assert (unproven.verdict, "METAL_FAST_SYNCH=on" in unproven.remedy) == ("FAIL", True)
    assert _judge_fast_synch("on", path).verdict == "FAIL"
    kind, _, name = healthy_rank(0).device.partition(" ")
    fast_synch.record_proof(path, fast_synch.platform_build(kind, name, "darwin"))
    assert _judge_fast_synch("on", path).verdict == "PASS"


def test_verify_skips_metal_fast_synch_check_on_linux(tmp_path: Path) -> None:
    """On Linux the check is skipped, because only Metal has fast synchronization."""
    assert _judge_fast_synch("on", tmp_path / "file", "linux").verdict == "SKIP"
