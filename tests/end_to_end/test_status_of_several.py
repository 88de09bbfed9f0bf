"""`lockstep status` and its siblings without flags, with one and two Locksteps running."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared import limits
from tests.end_to_end.running_lockstep import running_lockstep
from tests.support.captured_process import ROOT

NAMES = ("LOCKSTEP_PATHS_RUN_DIR", "LOCKSTEP_GATEWAY_PORT")


def _run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    return subprocess.run(
        [sys.executable, "-m", "services.commands.main", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.proof
def test_commands_without_flags_find_what_runs_and_ask_which_of_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ports and run folders may be any. With two running, `status` lists both, `--port` chooses
    one, and a command that changes something asks which."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert "You run no Lockstep" in _run("status", "--all").stderr
    with running_lockstep(tmp_path / "first") as first:
        alone = _run("status")
        assert alone.stdout.startswith("Lockstep is ready"), alone.stderr
        assert _run("drain", "--off").returncode == limits.EXIT_OK

        with running_lockstep(tmp_path / "second") as second:
            listed = _run("status").stdout
            assert listed.startswith("2 Locksteps run here")
            for one, folder in ((first, "first"), (second, "second")):
                assert str(one.port) in listed
                assert str(tmp_path / folder) in listed
            reports = json.loads(_run("status", "--all", "--json").stdout)
            assert {report["port"] for report in reports} == {first.port, second.port}
            assert all(report["ready"] for report in reports)
            assert {report["pid"] for report in reports} == {first.process.pid, second.process.pid}

            chosen = _run("status", "--port", str(second.port), "--json")
            (rank,) = json.loads(chosen.stdout)["ranks"]
            assert rank["pid"] == second.children()["rank-worker 0"]
            refused = _run("restart", "ranks")
            assert refused.returncode == limits.EXIT_USAGE
            assert f"--port {first.port}" in refused.stderr
    assert "You run no Lockstep" in _run("status", "--all").stderr
